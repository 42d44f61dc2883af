"""The worker process: opens a model's files and an engine, and serves them."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING

from dynamo.core.errors import Unsupported, WorkerFailed
from dynamo.core.plugins import ENGINES, engine_needs_weights
from dynamo.core.reply import Engine
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_engine import AUTO
from dynamo.core.settings.server_url import lacks_tokenizer
from dynamo.inference import worker as inference_worker
from dynamo.inference.embedding.server import EmbeddingServer
from dynamo.inference.engine_registry import EngineInputs, open_engine
from dynamo.inference.engines.arguments import check_roles, engine_environment
from dynamo.inference.engines.choice import with_engine
from dynamo.inference.engines.packages import check_engine_package
from dynamo.inference.native.engine_sizing import available_memory_bytes
from dynamo.inference.openai_server.factory import open_text_engine
from dynamo.models.card import ModelCard
from dynamo.models.embedding_model import (
    EmbeddingCard,
    is_embedding_folder,
    read_embedding_model,
    weights_digest,
)
from dynamo.models.resolve import ModelFiles, resolve_model
from dynamo.runtime.deployment import deployment_of
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.services.frontend_namespaces import FrontendNamespaces
from dynamo.services.model_store.preparation import (
    PREPARING_REASON,
    ThreadSafeProgress,
    fetch_adapter,
    fetch_model_of,
    offer_model_of,
)
from dynamo.services.model_store.store import open_model_store

if TYPE_CHECKING:
    from dynamo.inference.native.weight_peers import WeightPeers

log = logging.getLogger(__name__)

ENGINE_CHECK_INTERVAL_S = 1.0
MODEL_HEALTH_KEY = "model"
ENGINE_HEALTH_KEY = "engine"


class WorkerService:
    """Serves the settings' model until the runtime shuts down."""

    async def attach(self, runtime: DistributedRuntime) -> None:
        """Start the engine and serve. Raises `ModelUnavailable`, `ConfigError`."""
        if runtime.settings.engine.kind == AUTO:  # else the deployment has chosen
            runtime.settings = await runtime.clock.offload(with_engine, runtime.settings)
        settings = runtime.settings
        runtime.engine = kind = settings.engine.kind
        ENGINES.check(kind)
        check_roles(settings)
        check_engine_package(kind)
        os.environ.update(engine_environment(settings))  # CUDA reads it there alone

        if lacks_tokenizer(settings):
            runtime.health.set_unhealthy(MODEL_HEALTH_KEY, "the server does not answer yet")
            await self._serve(runtime, *await open_text_engine(settings, runtime.clock))
            return

        def report(step: str) -> None:
            runtime.health.set_unhealthy(MODEL_HEALTH_KEY, f"{PREPARING_REASON}: {step}")
            log.info("preparing the model", extra={"fields": {"step": step}})

        progress, with_weights = ThreadSafeProgress(report), engine_needs_weights(kind)
        store = await open_model_store(runtime)
        await fetch_model_of(store, settings.model.path, progress, with_weights=with_weights)
        files = await resolve_model(
            settings.model.path, progress, with_weights=with_weights, clock=runtime.clock
        )
        await offer_model_of(store, settings.model.path, files)
        runtime.health.set_unhealthy(MODEL_HEALTH_KEY, "the engine is starting")
        if is_embedding_folder(files.path):
            await _serve_embeddings(runtime, files)
            return
        card = make_card(files, settings)
        memory_bytes = settings.model.memory or available_memory_bytes(settings.worker_count)
        shared = runtime.shared_memory, _weight_peers(runtime)
        inputs = EngineInputs(settings, card, files, runtime.clock, memory_bytes, *shared)
        await self._serve(runtime, await open_engine(kind, inputs), card)

    async def _serve(self, runtime: DistributedRuntime, engine: Engine, card: ModelCard) -> None:
        kind = runtime.settings.engine.kind
        fetch = partial(fetch_adapter, await open_model_store(runtime))
        worker = inference_worker.EngineWorker(engine, card, fetch_adapter=fetch)
        runtime.model = card.names[0]
        served_card = await worker.attach(runtime)
        runtime.add_shutdown_hook(worker.close)
        runtime.health.set_healthy(MODEL_HEALTH_KEY)
        runtime.tasks.start(_watch_engine(runtime), "engine watch")
        runtime.tasks.start(FrontendNamespaces(runtime).run(), "frontend namespaces")
        fields = {"model": served_card.name, "engine": kind, "instance": runtime.instance_id}
        fields["namespace"] = runtime.settings.runtime.namespace
        log.info("worker serves", extra={"fields": fields})


def _weight_peers(runtime: DistributedRuntime) -> WeightPeers | None:
    """Return the peers of a native worker that others share discovery with; else None."""
    settings = runtime.settings
    if settings.engine.kind != "native" or runtime.shared_memory is None:
        return None
    if runtime.planes.discovery == deployment_of(settings).discovery_url:
        return None
    from dynamo.inference.native.weight_peers import WeightPeers

    return WeightPeers(runtime)


async def _serve_embeddings(runtime: DistributedRuntime, files: ModelFiles) -> None:
    """Serve an embedding model. Raises `ModelUnavailable`, or `Unsupported` for other engines."""
    settings = runtime.settings
    if settings.engine.kind != "native":
        raise Unsupported(
            f"{files.name} is an embedding model, which the engine {settings.engine.kind!r} does "
            "not serve",
            hint="use out=native, or name a model that generates text",
        )
    model = read_embedding_model(files.path)
    context_tokens = min(
        settings.model.context_tokens or model.context_tokens, model.context_tokens
    )
    card = EmbeddingCard(
        names=tuple(settings.model.names) or (files.name,),
        dimensions=model.hidden_size,
        context_tokens=context_tokens,
        vocab_size=model.vocab_size,
        tokenizer=files.tokenizer,
        weights=await runtime.clock.offload(weights_digest, files.path),
        created=int(runtime.clock.wall()),
        source=files.source,
    )
    worker = EmbeddingServer(files.path, model, card)
    runtime.model = card.names[0]
    if runtime.stand_by is not None:
        await runtime.stand_by()
    await worker.attach(runtime)
    runtime.add_shutdown_hook(worker.close)
    runtime.health.set_healthy(MODEL_HEALTH_KEY)
    runtime.tasks.start(FrontendNamespaces(runtime).run(), "frontend namespaces")
    fields = {"model": card.names[0], "instance": runtime.instance_id}
    fields["namespace"] = runtime.settings.runtime.namespace
    log.info("worker serves embeddings", extra={"fields": fields})


async def _watch_engine(runtime: DistributedRuntime) -> None:
    """End the process when its engine has died, so that the supervisor starts another."""
    while not (reason := runtime.health.reasons.get(ENGINE_HEALTH_KEY)):
        await runtime.clock.sleep(ENGINE_CHECK_INTERVAL_S)
    if not runtime.stopping.cancelled:  # else the engine was stopped with the process
        runtime.fail(WorkerFailed(f"the engine died: {reason}"))


def make_card(files: ModelFiles, settings: Settings) -> ModelCard:
    """Return the model's card with the names and limits of the settings."""
    return files.build_card(
        names=settings.model.names,
        context_tokens=settings.model.context_tokens,
        block_tokens=settings.engine.block_size,
        tool_format=settings.model.tool_format,
    )
