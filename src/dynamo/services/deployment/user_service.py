"""The process of a user's service."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError, DynamoError, nearest_name_hint
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.processes.parent_pipe import ParentPipe
from dynamo.sdk.decorators import is_service
from dynamo.sdk.serving import start_service

USER_SERVICE_ROLE = "service"


class UserServiceSpec(msgspec.Struct, frozen=True):
    """The service of a process: `target` is MODULE:Service, importable from `folder`; `section` is
    its configuration."""

    target: str
    folder: str
    section: dict[str, Any] = {}


def run_user_service() -> int:
    """Run the service that the supervisor names on standard input; return the exit code."""
    from dynamo.runtime.processes.process import run_process

    parent = ParentPipe.from_stdin()
    start = parent.start_message
    task = msgspec.convert(start.task, UserServiceSpec)

    async def main(runtime: DistributedRuntime) -> None:
        await start_service(load_service(task.target, task.folder), runtime, task.section)

    return run_process(main, start.settings, USER_SERVICE_ROLE, start.name, parent=parent)


def load_service(target: str, folder: str) -> type[Any]:
    """Import the class MODULE:Service; modules in `folder` come first. Raises `ConfigError`."""
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(
            f"{target!r} is not the name of a service",
            hint="write MODULE:Service, e.g. graphs.agg:Frontend",
        )
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = _import_module(module_name, folder)
    service: Any = getattr(module, name, None)
    if service is None:
        known = [key for key, value in vars(module).items() if is_service(value)]
        raise ConfigError(
            f"{module_name} has no service {name!r}", hint=nearest_name_hint(name, known)
        )
    if not is_service(service):
        raise ConfigError(
            f"{target} is not a service", hint="decorate its class with @service(...)"
        )
    loaded: type[Any] = service
    return loaded


def _import_module(name: str, folder: str) -> Any:
    try:
        return importlib.import_module(name)
    except DynamoError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _import_error(name, error) from error
        raise ConfigError(
            f"there is no module {name!r} in {folder}", hint=_suggest_modules(name, Path(folder))
        ) from None
    except Exception as error:
        raise _import_error(name, error) from error


def _import_error(name: str, error: Exception) -> ConfigError:
    """Return an error with the place inside a user's module."""
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}"
        return ConfigError(f"{name} cannot be imported: {error.msg} ({place})")
    steps = traceback.extract_tb(error.__traceback__)
    own = [step for step in steps if "importlib" not in step.filename]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return ConfigError(f"{name} cannot be imported: {type(error).__name__}: {error}{place}")


def _suggest_modules(name: str, folder: Path) -> str:
    """Return a hint for a module that does not exist."""
    packages = name.split(".")[:-1]
    package_folder = folder.joinpath(*packages)
    modules = sorted(package_folder.glob("*.py"))
    known = [path.stem for path in modules if not path.stem.startswith("_")]
    if not known:
        return "run the command in the folder of your modules"
    prefix = "".join(f"{package}." for package in packages)
    return nearest_name_hint(name, [f"{prefix}{module}" for module in known])
