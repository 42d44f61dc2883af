"""The start of a foreign engine: its processes, its output, and the reason if it fails."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from dynamo.core.errors import ConfigError, DynamoError, ModelUnavailable
from dynamo.inference.engines.processes import EngineProcesses
from dynamo.telemetry.engine_output import EngineOutput, use_own_handlers


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
def starting(title: str, logger: str, processes: EngineProcesses) -> Iterator[None]:
    """Own the processes that are started in the `with` statement, and log what they print.

    A failure is raised as `ConfigError` if the engine does not know an argument, else as
    `ModelUnavailable`. The reason is what the engine's processes have printed, if they have.
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
        reason = output.failure_reason() or str(error).strip() or repr(error)
        raise ModelUnavailable(f"{title} cannot start: {reason.splitlines()[0]}") from error
    finally:
        output.close()
        use_own_handlers(logger)
