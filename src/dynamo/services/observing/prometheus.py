"""The process that runs an installed Prometheus, which watches the deployment."""

from __future__ import annotations

import asyncio
import logging
import shutil
from asyncio.subprocess import DEVNULL
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Literal

import msgspec

from dynamo.core.errors import DynamoError, WorkerFailed
from dynamo.core.host.parent_death_signal import dying_with_parent
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_monitoring import PrometheusSettings
from dynamo.models.file_cache import write_atomically
from dynamo.operations.alerts.conditions import prometheus_rules
from dynamo.operations.alerts.rules import RULES
from dynamo.runtime.deployment import deployment_of
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.processes.exit_status import describe_exit
from dynamo.runtime.processes.ports import check_port_free
from dynamo.services.scrape_targets import ScrapeTargets

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
RETRY_S = 2.0

ObservingRole = Literal["observer", "prometheus"]


def observing_roles(settings: Settings) -> Sequence[ObservingRole]:
    """Return the roles of the processes that watch a deployment, one process of each."""
    runs = settings.monitoring.prometheus.enabled and shutil.which("prometheus") is not None
    observer: list[ObservingRole] = ["observer"] if settings.observer.enabled else []
    return [*observer, "prometheus"] if runs else observer


def warn_if_missing(settings: PrometheusSettings) -> None:
    """Log that no Prometheus is started although the settings want one. Requests do not need it,
    so the deployment starts."""
    if settings.enabled and shutil.which("prometheus") is None:
        log.warning(
            "no Prometheus is started: monitoring.prometheus.enabled is on, and PATH has no "
            "program `prometheus`; install it, or turn the setting off"
        )


class PrometheusService:
    """Runs Prometheus, whose lines are those of this process, and ends with it. The files are in
    the folder `prometheus` of the deployment's state folder."""

    async def attach(self, runtime: DistributedRuntime) -> None:
        """Start Prometheus, without waiting until it has read its data."""
        self._runtime, self._settings = runtime, runtime.settings.monitoring.prometheus
        self._folder = deployment_of(runtime.settings).folder / "prometheus"
        self._process: asyncio.subprocess.Process | None = None
        runtime.public_address = f"http://{HOST}:{self._settings.port}"
        runtime.add_shutdown_hook(self._stop)
        runtime.tasks.start(self._run(), "prometheus")

    async def _run(self) -> None:
        runtime = self._runtime
        try:
            self._write_configuration()
            await self._wait_for_port()
            self._process = await asyncio.create_subprocess_exec(
                *dying_with_parent(self._command()), stdin=DEVNULL, cwd=self._folder
            )
            runtime.tasks.start(self._follow_targets(), "scrape targets")
            failure = f"it ended: {describe_exit(await self._process.wait())}"
        except (OSError, DynamoError) as error:
            failure = str(error)
        await runtime.clock.sleep(RETRY_S)  # the deployment has become ready
        if not runtime.stopping.cancelled:
            runtime.fail(WorkerFailed(f"Prometheus: {failure}", hint="its log lines say why"))

    def _command(self) -> Sequence[str]:
        log_format = "json" if self._runtime.settings.logging.format == "json" else "logfmt"
        return [
            *("prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"),
            *("--storage.tsdb.retention.size=512MB", "--enable-feature=exemplar-storage"),
            *("--log.level=warn", f"--log.format={log_format}"),
            f"--web.listen-address={HOST}:{self._settings.port}",
        ]

    def _write_configuration(self) -> None:
        """Write the configuration and the rules as JSON, which is YAML, too. Blocks shortly."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        interval = f"{round(self._settings.scrape_interval * 1000)}ms"
        job = {"job_name": "dynamo", "file_sd_configs": [{"files": ["targets.json"]}]}
        intervals = {"scrape_interval": interval, "evaluation_interval": interval}
        files = {"rule_files": ["rules.yml"], "scrape_configs": [job]}
        self._write("prometheus.yml", {"global": intervals, **files})
        self._write("rules.yml", prometheus_rules(RULES))

    def _write(self, name: str, content: Any) -> None:
        write_atomically(self._folder / name, msgspec.json.encode(content))

    async def _wait_for_port(self) -> None:
        """Wait until the port is free. A process that this one replaces has it until it has written
        its data, for less than one retry; another owner is reported."""
        for attempt in count():
            try:
                await self._runtime.clock.offload(check_port_free, HOST, self._settings.port)
                return
            except DynamoError as error:
                if attempt == 1:
                    fields = {"error": error.message, "hint": "set monitoring.prometheus.port"}
                    text = "Prometheus waits until its port is free"
                    log.warning(text, extra={"fields": fields})
            await self._runtime.clock.sleep(RETRY_S)

    async def _follow_targets(self) -> None:
        """Write the status ports of all processes to a file, which Prometheus reads. Unlike the
        frontends' list it needs no key, and remains while discovery is away."""
        targets, written = ScrapeTargets(self._runtime), None
        while True:
            with suppress(OSError, DynamoError):  # a full disk, or discovery is away
                if (listed := await targets.list_targets()) != written:
                    await self._runtime.clock.offload(self._write, "targets.json", listed)
                    written = listed
            await self._runtime.clock.sleep(RETRY_S)

    async def _stop(self, _: float) -> None:
        """Let Prometheus write what it has in memory, and wait for its end."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()
