"""What must hold between settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dynamo.core.errors import ConfigError
from dynamo.core.settings.schema import Settings
from dynamo.core.settings.schema_cluster import WorkerGroupSettings


def check_consistency(settings: Settings, origins: Mapping[str, str]) -> None:
    """Raises `ConfigError` for settings that cannot hold together."""
    owners: dict[tuple[str, int], str] = {}
    for key, group in _worker_groups(settings):
        for device in dict.fromkeys(group.device_ids):
            before = owners.setdefault((group.host, device), key)
            if before != key:
                where = f"{before} ({origins[f'{before}.device_ids']})"
                raise ConfigError(
                    f"device {device} is given to {where} and "
                    f"to {key} ({origins[f'{key}.device_ids']})",
                    hint="give each its own devices; groups on different hosts say `host:`",
                    param=f"{key}.device_ids",
                )


def _worker_groups(settings: Settings) -> Iterator[tuple[str, WorkerGroupSettings]]:
    yield "workers.prefill", settings.workers.prefill
    yield "workers.decode", settings.workers.decode
    for key in ("prefill_workers", "decode_workers"):
        for at, group in enumerate(getattr(settings, key)):
            yield f"{key}[{at}]", group
