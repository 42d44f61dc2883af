"""The start of a foreign engine: its processes, its output, and the reason if it fails."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from dynamo.core.errors import ConfigError, DynamoError, ModelUnavailable
from dynamo.inference.engines.processes import EngineProcesses
from dynamo.telemetry.engine_output import EngineOutput, use_own_handlers

MAX_REASON_CHARS = 500


@contextmanager
def without_collections() -> Iterator[None]:
    """Let the garbage collector leave alone what is created in the `with` statement, for ever.

    An engine's packages are a million objects. A full collection walks them for a second, and
    several on busy cores, while it holds the GIL: the event loop answers nothing, and the
    supervisor takes the process for hung.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def starting(
    title: str,
    logger: str,
    processes: EngineProcesses,
    advice: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[None]:
    """Own the processes that are started in the `with` statement, and log what they print.

    A failure is raised as `ConfigError` if the engine does not know an argument or `advice` has a
    regular expression of its reason, else as `ModelUnavailable`. The reason is what the engine's
    processes have printed, if they have.
    """
    output = EngineOutput(f"dynamo.engines.{logger}")
    output.open()
    try:
        with without_collections(), processes.starting():
            yield
    except DynamoError:
        raise
    except TypeError as error:
        raise ConfigError(f"{title} refuses its arguments: {error}") from error
    except Exception as error:
        text = " ".join(str(error).split())[:MAX_REASON_CHARS] or repr(error)
        raise start_error(title, output.failure_reason() or text, advice) from error
    finally:
        output.close()
        use_own_handlers(logger)


def start_error(title: str, reason: str, advice: Mapping[str, str]) -> DynamoError:
    """Return the error for a start that failed by `reason`, with what a user can do."""
    for pattern, hint in advice.items():
        if match := re.search(pattern, reason):
            return ConfigError(f"{title} cannot start: {reason}", hint=hint.format(*match.groups()))
    return ModelUnavailable(f"{title} cannot start: {reason}")
