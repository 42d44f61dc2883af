"""The memory that standby processes hold while they wait."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dynamo.core.errors import ConfigError
from dynamo.core.plugins import engine_needs_weights
from dynamo.core.settings import Settings
from dynamo.inference.native.engine_sizing import available_memory_bytes
from dynamo.runtime.processes.child_spec import ChildSpec

PROCESS_BYTES = 64 << 20
"""A process without weights and with empty KV blocks, which take memory when they are written."""


def check_standby_memory(specs: Sequence[ChildSpec]) -> None:
    """Raise `ConfigError` for standby processes that the free memory does not hold."""
    sizes = [_standby_bytes(spec.settings) for spec in specs if spec.standby]
    if not sizes or sum(sizes) <= (free := available_memory_bytes()):
        return
    raise ConfigError(
        f"{len(sizes)} standby processes would hold {sum(sizes) >> 20} MiB, and {free >> 20} MiB "
        "of memory are free",
        hint=f"lower --standby: there is room for {int(len(sizes) * free / sum(sizes))} in all",
        param="engine.standby",
    )


def _standby_bytes(settings: Settings) -> int:
    """Estimate what one holds. Workers of the native engine share their weights; others each load
    the files of their model, as far as these are here."""
    kind, path = settings.engine.kind, settings.model.path
    if kind == "native" or not (path and engine_needs_weights(kind)):
        return PROCESS_BYTES
    files = [Path(path), *Path(path).glob("*")]
    return PROCESS_BYTES + sum(file.stat().st_size for file in files if file.is_file())
