"""The worker that serves a user's engine: a registered model whose handler is the engine."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dynamo.common.backend.engine import BaseEngine, EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.publisher import PushSource
from dynamo.common.constants import DisaggregationMode
from dynamo.core.errors import ConfigError, Unsupported
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.compatibility.calls import CompatContext, instance_number
from dynamo.runtime.compatibility.objects import CompatEndpoint, CompatRuntime
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.environment import environment_settings
from dynamo.runtime.logging import configure_dynamo_logging
from dynamo.services.compatibility.models import (
    KvEventPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerMetricsPublisher,
    WorkerType,
    register_model,
)

MODEL_TYPES = {"chat": ModelType.Chat, "completions": ModelType.Completions}


@dataclass
class WorkerConfig:
    """How a worker serves an engine. Fields that the worker does not read have no effect."""

    namespace: str
    component: str = "backend"
    endpoint: str = "generate"
    model_name: str = ""
    served_model_name: str | None = None
    model_input: ModelInput = ModelInput.Tokens
    endpoint_types: str = "chat,completions"
    discovery_backend: str = "etcd"
    request_plane: str = "tcp"
    event_plane: str | None = None
    use_kv_events: bool = False
    custom_jinja_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    exclude_tools_when_tool_choice_none: bool = True
    enable_local_indexer: bool = True
    enable_kv_routing: bool = True
    metrics_labels: list[tuple[str, str]] = field(default_factory=list)
    disaggregation_mode: DisaggregationMode = DisaggregationMode.AGGREGATED
    health_check_payload: dict[str, Any] | None = None
    structural_tag: dict[str, object] | None = None
    route_to_encoder: bool = False
    media_decoder: Any = None
    media_fetcher: Any = None
    kv_state_endpoint: str | None = None
    default_thinking_mode: str | None = None
    response_plane: str = "tcp"

    @property
    def model_type(self) -> ModelType:
        """The APIs of `endpoint_types`. Raises `ConfigError`."""
        types = ModelType.Empty
        for name in filter(None, self.endpoint_types.replace(" ", "").split(",")):
            if name not in MODEL_TYPES:
                raise ConfigError(f"unknown endpoint type {name!r}", hint="chat, completions")
            types |= MODEL_TYPES[name]
        return types

    def environment(self) -> dict[str, str]:
        """The variables that choose the namespace and the planes."""
        names = {
            "DYN_NAMESPACE": self.namespace,
            "DYN_DISCOVERY_BACKEND": self.discovery_backend,
            "DYN_REQUEST_PLANE": self.request_plane,
            "DYN_EVENT_PLANE": self.event_plane or "",
        }
        return {name: value for name, value in names.items() if value}


class EngineHarness:
    """Serves one engine until SIGTERM or SIGINT. Requests in flight end before its `cleanup`."""

    def __init__(self, engine: BaseEngine, config: WorkerConfig) -> None:
        self.engine = engine
        self.config = config

    async def run(self) -> None:
        """Start the engine, register the model and serve. Raises the errors of these."""
        if not isinstance(self.engine, LLMEngine):
            raise Unsupported(
                f"{type(self.engine).__name__} is no LLMEngine", hint="engines of tokens are served"
            )
        configure_dynamo_logging()
        settings = environment_settings(variables=self.config.environment())
        runtime = CompatRuntime(DistributedRuntime(settings, "process", ""))
        runtime.stop_on(signal.SIGINT, signal.SIGTERM)
        try:
            await runtime.ready()
            await self._serve(runtime, self.engine)
        finally:
            runtime.shutdown()
            await runtime.closed.wait()

    async def _serve(self, runtime: CompatRuntime, engine: LLMEngine) -> None:
        config = self.config
        endpoint = runtime.endpoint(f"{config.namespace}.{config.component}.{config.endpoint}")
        try:
            started = await engine.start(instance_number(runtime.native.instance_id))
            if config.enable_kv_routing:
                await _attach_publishers(engine)
            await engine.on_endpoint_ready(endpoint)
            await self._register(endpoint, started)
            await endpoint.serve_endpoint(partial(_generate, engine))
        finally:
            await engine.cleanup()

    async def _register(self, endpoint: CompatEndpoint, started: EngineConfig) -> None:
        config, limits = self.config, started.llm or LlmRegistration()
        properties = ModelRuntimeConfig()
        properties.total_kv_blocks = limits.total_kv_blocks
        properties.max_num_seqs = limits.max_num_seqs
        properties.max_num_batched_tokens = limits.max_num_batched_tokens
        properties.tool_call_parser = config.tool_call_parser
        await register_model(
            config.model_input,
            config.model_type,
            endpoint,
            config.model_name or started.model,
            config.served_model_name or started.served_model_name,
            context_length=limits.context_length,
            kv_cache_block_size=limits.kv_cache_block_size,
            runtime_config=properties,
            custom_template_path=config.custom_jinja_template,
            worker_type=WorkerType[config.disaggregation_mode.name.title()],
            needs=config.route_to_encoder,
            model_aliases=started.model_aliases,
        )


async def _generate(
    engine: LLMEngine, request: Any, context: CompatContext
) -> AsyncGenerator[Any, None]:
    async with BackgroundTasks(on_failure=lambda _: None) as tasks:
        aborts = set()
        if type(engine).abort is not BaseEngine.abort:
            aborts.add(tasks.start(_abort_when_left(engine, context)))
        try:
            async with aclosing(engine.generate(request, context)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:  # an engine that looks at the context may end before the abort has begun
            if aborts and context.is_killed():
                await asyncio.wait(aborts)


async def _abort_when_left(engine: LLMEngine, context: CompatContext) -> None:
    """Abort a request that is cancelled, and none whose answer has reached its limit."""
    await context.async_killed_or_stopped()
    if context.is_killed():
        await engine.abort(context)


async def _attach_publishers(engine: LLMEngine) -> None:
    """Give the engine the publishers that it wants, which have no effect."""
    for source in await engine.kv_event_sources():
        if isinstance(source, PushSource):
            source.on_ready(KvEventPublisher())
    if engine.component_metrics_dp_ranks():
        engine.attach_snapshot_publisher(WorkerMetricsPublisher())


Worker = EngineHarness
"""NVIDIA Dynamo's name."""
