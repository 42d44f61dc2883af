"""The observer process: keeps the stories of a deployment's requests and answers over HTTP."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dynamo.application.console.handler import CONSOLE_PATH, ConsoleHandler, DeploymentStream
from dynamo.application.observer import ObserverHandler
from dynamo.communication.events import Event
from dynamo.core.errors import DECODE_ERRORS, DynamoError
from dynamo.core.settings import Settings
from dynamo.operations.observer.observer import DeploymentObserver
from dynamo.operations.observer.slo_books import SloBooks
from dynamo.operations.observer.stories import KeptStory
from dynamo.operations.observer.timeline import SAMPLE_INTERVAL_S
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.scheduling.workers.load_view import LoadView
from dynamo.services.model_pipeline import WORKER_COMPONENT
from dynamo.services.observing.console import DeploymentConsole
from dynamo.services.observing.pages import OBSERVERS_PREFIX, serve_pages
from dynamo.services.observing.slo_counter import promised_ttft_s, slo_file
from dynamo.services.observing.trace_export import TraceExporter, TraceOptions
from dynamo.telemetry.story import STORIES_SUBJECT, decode_batch

log = logging.getLogger(__name__)

BOOKS_INTERVAL_S = 5.0


class ObserverService:
    """Subscribes to stories and load reports of its namespace until the runtime shuts down. No
    request waits for it."""

    async def attach(self, runtime: DistributedRuntime) -> None:
        """Start to observe. Raises `PortInUse`, `ConfigError`."""
        self._runtime = runtime
        books = SloBooks(lambda: slo_file(runtime.settings), runtime.clock.wall)
        self._observer = DeploymentObserver(runtime.clock, books)
        self._apply_settings(runtime.settings)
        runtime.on_settings_change(self._apply_settings)
        self._loads = LoadView(runtime.clock)
        namespace = runtime.settings.runtime.namespace
        self._prefix = f"{OBSERVERS_PREFIX}{namespace}/"
        self._key, self._is_first = f"{self._prefix}{runtime.instance_id}", True
        await self._loads.subscribe(runtime.events, f"{namespace}.{WORKER_COMPONENT}")
        await runtime.events.subscribe(f"{namespace}.{STORIES_SUBJECT}", self._on_event)
        self._declare_metrics()
        if (options := TraceOptions.from_environ(os.environ)) is not None:
            self._export_traces(options)
        settings, observer = runtime.settings.observer, self._observer
        console = ConsoleHandler(DeploymentConsole(runtime, observer))
        routes = {
            **ObserverHandler(observer).routes(),
            **console.routes(),
        }
        reserved = runtime.task.get("port", 0)
        is_shared = reserved and settings.port in (0, reserved)
        await serve_pages(
            runtime,
            settings.host,
            reserved if is_shared else settings.port,
            routes,
            self._health_facts,
            page_path=CONSOLE_PATH,
            open_pages=console.pages(),
            reuse_port=bool(is_shared),
        )
        log.info("observer listens", extra={"fields": {"url": runtime.public_address}})
        runtime.add_shutdown_hook(lambda _: console.stream.close())
        runtime.tasks.start(self._sample_every_second(console.stream), "worker samples")
        runtime.tasks.start(self._write_books(), "slo")
        await runtime.discovery.put(self._key, runtime.public_address.encode())

    def _export_traces(self, options: TraceOptions) -> None:
        runtime = self._runtime
        exporter = TraceExporter(options, runtime.clock, runtime.metrics)

        def export(entry: KeptStory) -> None:
            if self._is_first:
                exporter.add(entry)

        self._observer.listeners.append(export)
        runtime.tasks.start(exporter.run(), "traces")

    def _apply_settings(self, settings: Settings) -> None:
        target, gap_s = settings.observer.slo_target, settings.observer.gap_slo
        self._observer.promise = (target, promised_ttft_s(settings), gap_s)

    def _on_event(self, event: Event) -> None:
        if event.kind == "gone":
            self._observer.on_process_gone(event.publisher)
        if not event.payload:
            return
        try:
            batch = decode_batch(event.payload)
        except DECODE_ERRORS as error:
            self._undecodable.inc()
            fields = {"process": event.publisher, "error": str(error)}
            log.warning("stories of another version are skipped", extra={"fields": fields})
            return
        self._observer.on_batch(batch)

    def _declare_metrics(self) -> None:
        metrics, observer = self._runtime.metrics, self._observer
        self._undecodable = metrics.counter(
            "dynamo_observer_unreadable_batches_total", "Batches of stories that cannot be read"
        )
        metrics.counter(
            "dynamo_observer_stories_total",
            "Stories of requests that this observer has received",
            callback=lambda: {(): observer.received},
        )
        metrics.counter(
            "dynamo_observer_slo_failures_total",
            "Times that the counts of `dynamo slo` could not be written; they are written later",
            callback=lambda: {(): observer.slo_books.failures},
        )
        metrics.gauge(
            "dynamo_router_alert_ratio",
            "Value of a broken routing rule over its threshold; 0 while the rule holds",
            ("alert",),
            callback=observer.collector.alert_ratios,
        )

    async def _sample_every_second(self, stream: DeploymentStream) -> None:
        clock = self._runtime.clock
        while True:
            await clock.sleep(SAMPLE_INTERVAL_S)
            try:
                self._observer.sample(self._loads.loads)
                await stream.update()
            except Exception:
                log.exception("workers were not sampled or shown")

    async def _write_books(self) -> None:
        """Write the counts of requests, and find out whether this observer exports traces: the
        first one does. A disk that is full is reported once."""
        clock, books, written = self._runtime.clock, self._observer.slo_books, True
        while True:
            await clock.sleep(BOOKS_INTERVAL_S)
            self._observer.find_causes()
            before, written = written, await clock.offload(books.write)
            if before and not written:
                log.warning("requests for `dynamo slo` are not written; it is tried again")
            with suppress(OSError, DynamoError):
                observers = await self._runtime.discovery.get(self._prefix)
                self._is_first = self._key <= min(observers, default=self._key)

    def _health_facts(self) -> Mapping[str, Any]:
        return {
            "instance": self._runtime.instance_id,
            "stories": self._observer.received,
            "workers": len(self._loads.loads),
        }
