"""The worker's process: a model's files, an engine of the kind asked for, served."""

from __future__ import annotations

import asyncio
import logging

from dynamo.core.errors import WorkerFailed
from dynamo.core.settings import Settings
from dynamo.inference import worker as inference_worker
from dynamo.inference.engines import EngineInputs, check_kind, open_engine
from dynamo.models.card import ModelCard
from dynamo.models.resolve import ModelFiles, resolve_model
from dynamo.runtime.distributed import DistributedRuntime

log = logging.getLogger(__name__)

TELL_EVERY_S = 2.0
LOOK_EVERY_S = 1.0
MODEL = "model"
ENGINE = "engine"


class Worker:
    """Opens the model that the settings name and serves it until the runtime shuts down."""

    async def attach(self, runtime: DistributedRuntime) -> None:
        """Raises `ModelUnavailable`, `ConfigError`."""
        settings = runtime.settings
        kind = settings.engine.kind
        check_kind(kind)
        progress = Progress(runtime)
        files = await resolve_model(
            settings.model.path, progress, with_weights=kind == "native", clock=runtime.clock
        )
        runtime.health.unwell(MODEL, "the engine is starting")
        card = card_of(files, settings)
        engine = await open_engine(kind, EngineInputs(settings, card, files, runtime.clock))
        worker = inference_worker.Worker(engine, card)
        announced = await worker.attach(runtime)
        runtime.at_shutdown(worker.close)
        runtime.health.well_again(MODEL)
        runtime.tasks.start(_watch_engine(runtime), "engine watch")
        log.info(
            "worker serves",
            extra={"fields": {"model": announced.name, "engine": kind, "id": runtime.instance_id}},
        )


async def _watch_engine(runtime: DistributedRuntime) -> None:
    """A worker whose engine has died is of no use: it leaves, and the supervisor starts another."""
    while not (reason := runtime.health.reasons.get(ENGINE)):
        await runtime.clock.sleep(LOOK_EVERY_S)
    runtime.fail(WorkerFailed(f"the engine died: {reason}"))


def card_of(files: ModelFiles, settings: Settings) -> ModelCard:
    """The model's card under the names and limits of the settings."""
    return files.card(
        names=settings.model.names,
        context_tokens=settings.model.context_tokens,
        block_tokens=settings.engine.block_size,
    )


class Progress:
    """What the model's files are being prepared by, in /health and now and then in the log. May be
    called from any thread."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self._runtime = runtime
        self._loop = asyncio.get_running_loop()
        self._told = ("", 0.0)

    def __call__(self, what: str, done: int, total: int) -> None:
        self._loop.call_soon_threadsafe(self._tell, what, done, total)

    def _tell(self, what: str, done: int, total: int) -> None:
        now = self._runtime.clock.now()
        if what == self._told[0] and now - self._told[1] < TELL_EVERY_S and done < total:
            return
        self._told = (what, now)
        share = f" ({done * 100 // total} %)" if total else ""
        self._runtime.health.unwell(MODEL, f"the model is getting ready: {what}{share}")
        log.info("getting the model ready", extra={"fields": {"step": f"{what}{share}"}})
