"""The worker's process: a model's files, an engine of the kind asked for, served."""

from __future__ import annotations

import logging

from dynamo.core.errors import WorkerFailed
from dynamo.core.plugins import ENGINES, engine_needs_weights
from dynamo.core.settings import Settings
from dynamo.inference import worker as inference_worker
from dynamo.inference.engine_registry import EngineInputs, open_engine
from dynamo.models.card import ModelCard
from dynamo.models.resolve import ModelFiles, resolve_model
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.services.model_download import PREPARING_REASON, ThreadSafeProgress

log = logging.getLogger(__name__)

ENGINE_CHECK_INTERVAL_S = 1.0
MODEL_HEALTH_KEY = "model"
ENGINE_HEALTH_KEY = "engine"


class WorkerService:
    """Opens the model that the settings name and serves it until the runtime shuts down."""

    async def attach(self, runtime: DistributedRuntime) -> None:
        """Raises `ModelUnavailable`, `ConfigError`."""
        settings = runtime.settings
        kind = settings.engine.kind
        ENGINES.check(kind)

        def tell(how: str) -> None:
            runtime.health.set_unhealthy(MODEL_HEALTH_KEY, f"{PREPARING_REASON}: {how}")
            log.info("getting the model ready", extra={"fields": {"step": how}})

        files = await resolve_model(
            settings.model.path,
            ThreadSafeProgress(tell),
            with_weights=engine_needs_weights(kind),
            clock=runtime.clock,
        )
        runtime.health.set_unhealthy(MODEL_HEALTH_KEY, "the engine is starting")
        card = make_card(files, settings)
        engine = await open_engine(kind, EngineInputs(settings, card, files, runtime.clock))
        worker = inference_worker.EngineWorker(engine, card)
        announced = await worker.attach(runtime)
        runtime.add_shutdown_hook(worker.close)
        runtime.health.set_healthy(MODEL_HEALTH_KEY)
        runtime.tasks.start(_watch_engine(runtime), "engine watch")
        log.info(
            "worker serves",
            extra={"fields": {"model": announced.name, "engine": kind, "id": runtime.instance_id}},
        )


async def _watch_engine(runtime: DistributedRuntime) -> None:
    """A worker whose engine has died is of no use: it leaves, and the supervisor starts another."""
    while not (reason := runtime.health.reasons.get(ENGINE_HEALTH_KEY)):
        await runtime.clock.sleep(ENGINE_CHECK_INTERVAL_S)
    runtime.fail(WorkerFailed(f"the engine died: {reason}"))


def make_card(files: ModelFiles, settings: Settings) -> ModelCard:
    """The model's card under the names and limits of the settings."""
    return files.build_card(
        names=settings.model.names,
        context_tokens=settings.model.context_tokens,
        block_tokens=settings.engine.block_size,
    )
