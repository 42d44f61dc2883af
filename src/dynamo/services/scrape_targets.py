"""The status ports of a deployment, in the form of Prometheus' `http_sd_configs`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit

import msgspec

from dynamo.communication.addresses import is_loopback
from dynamo.core.errors import DECODE_ERRORS
from dynamo.core.host.pids import is_alive
from dynamo.runtime.deployment import ProcessRecord
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.processes.process_record import PROCESSES_PREFIX

log = logging.getLogger(__name__)

_decode = msgspec.json.Decoder(ProcessRecord).decode


class ScrapeTarget(msgspec.Struct, frozen=True):
    """A target group of Prometheus with one status port."""

    targets: tuple[str]
    labels: Mapping[str, str]


class ScrapeTargets:
    """Lists the processes of the namespace by their records in discovery."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self._runtime = runtime
        self._unreachable: Sequence[str] = ()

    async def list_targets(self) -> Sequence[ScrapeTarget]:
        """Return the status ports of all processes, supervisors too. Raises
        `PlaneUnavailable`. Ports that listen on loopback of another host are left out."""
        records = await self._runtime.discovery.get(PROCESSES_PREFIX)
        return await self._runtime.clock.offload(self._create_targets, records)

    def _create_targets(self, records: Mapping[str, bytes]) -> Sequence[ScrapeTarget]:
        targets: dict[str, ScrapeTarget] = {}
        unreachable = []
        for process in self._decode_records(records):
            name, deployment = process.name, process.deployment
            host, address = _parse_host(process.status_url)
            if is_loopback(host) and not is_alive(process.pid, process.start_ticks):
                unreachable.append(f"{deployment}/{name}")
            elif host:
                labels = {"role": process.role, "process": name, "deployment": deployment}
                targets[address] = ScrapeTarget((address,), labels)
        self._report_unreachable(unreachable)
        return list(targets.values())

    def _decode_records(self, records: Mapping[str, bytes]) -> Iterator[ProcessRecord]:
        """Yield the processes of this namespace."""
        namespace = self._runtime.settings.runtime.namespace
        for key, value in sorted(records.items()):
            try:
                process = _decode(value)
            except DECODE_ERRORS as error:
                fields = {"key": key, "error": str(error)}
                log.warning("bad process record", extra={"fields": fields})
                continue
            if process.namespace == namespace:
                yield process

    def _report_unreachable(self, names: Sequence[str]) -> None:
        """Log the processes that are no targets, once until they change."""
        if names and names != self._unreachable:
            log.warning(
                "status ports of other hosts listen on loopback and are no targets; set "
                "runtime.status_host there",
                extra={"fields": {"processes": names[:10], "count": len(names)}},
            )
        self._unreachable = names


def _parse_host(url: str) -> tuple[str, str]:
    """Return the host of a URL, and `host:port`. Both are empty if the URL has no host."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "", ""
    host = parts.hostname
    return ("", "") if host is None else (host, parts.netloc)
