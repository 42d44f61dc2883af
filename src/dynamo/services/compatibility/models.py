"""`register_model` of NVIDIA Dynamo's bindings: models that a program's handlers answer.

A handler of tokens becomes the engine of a worker, a handler of text a service's chat endpoint.
Frontends of the namespace of this process find both, whatever the path of the endpoint is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum, Flag, auto
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError, Unsupported
from dynamo.inference.handler.engine import HandlerEngine
from dynamo.inference.worker import EngineWorker
from dynamo.models.answers.families import find_family
from dynamo.models.card import ModelCard
from dynamo.models.resolve import resolve_model
from dynamo.models.tokenization.tokenizer import load_tokenizer
from dynamo.runtime.compatibility.objects import (
    CompatEndpoint,
    Handler,
    RegisteredModel,
    bind_handler,
)
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.sdk.service_model import ServiceModelRecord, service_model_key
from dynamo.services.frontend_namespaces import FrontendNamespaces
from dynamo.services.model_store.store import open_model_store

log = logging.getLogger(__name__)

WITHOUT_EFFECT = frozenset(
    (
        *("base_model_path", "ignore_weights", "max_gpu_lora_count", "media_decoder"),
        *("media_fetcher", "migration_limit", "router_config", "router_mode"),
        *("self_host_metadata", "skip_model_assets", "tensor_model_config", "user_data"),
    )
)
"""Arguments of `register_model` that are accepted and do nothing here."""


class ModelInput(Enum):
    """The form of requests that a handler takes."""

    Text = "text"
    Tokens = "tokens"
    Tensor = "tensor"


class ModelType(Flag):
    """The APIs for which a handler answers."""

    Empty = 0
    Chat = auto()
    Completions = auto()
    Embedding = auto()
    TensorBased = auto()
    Prefill = auto()
    Images = auto()
    Audios = auto()
    Videos = auto()
    Realtime = auto()
    Classify = auto()
    Pooling = auto()
    Rerank = auto()

    def supports_chat(self) -> bool:
        """Whether chat requests are answered."""
        return bool(self & ModelType.Chat)


class WorkerType(Enum):
    """The part of an answer that a worker computes."""

    Aggregated = "aggregated"
    Prefill = "prefill"
    Decode = "decode"
    Encode = "encode"


class RouterMode(Enum):
    """How a client or a frontend chooses workers. The value is the name here."""

    RoundRobin = "round_robin"
    Random = "random"
    KV = "kv"
    Direct = "direct"
    LeastLoaded = "least_loaded"
    PowerOfTwoChoices = "power_of_two"
    DeviceAwareWeighted = "weighted_round_robin"

    def __str__(self) -> str:
        return self.value


class ModelRuntimeConfig:
    """The properties of a worker's engine. Attributes that are not listed have no effect."""

    context_length: int | None = None
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    def __init__(self) -> None:
        self.runtime_data: dict[str, Any] = {}

    def set_engine_specific(self, key: str, value: Any) -> None:
        """Keep a value of the engine's own."""
        self.runtime_data[key] = value

    def get_engine_specific(self, key: str) -> Any:
        """Return a value of the engine's own."""
        return self.runtime_data.get(key)


class IgnoredPart:
    """A part of NVIDIA Dynamo that does nothing here, whatever is called. Its creation is logged:
    frontends of this project decide by themselves what the part would tell them."""

    def __init__(self, *_: Any, **__: Any) -> None:
        log.info("a part has no effect", extra={"fields": {"part": type(self).__name__}})

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class KvRouterConfig(IgnoredPart):
    """Stands for settings of `router` at the frontend."""


class RouterConfig(IgnoredPart):
    """Stands for `router.mode` at the frontend."""


class KvEventPublisher(IgnoredPart):
    """Publishes nothing: routers predict the blocks that handlers cache."""


class WorkerMetricsPublisher(IgnoredPart):
    """Publishes nothing: routers count the requests of handlers."""

    async def create_endpoint(self, *_: Any) -> None:
        """Do nothing."""


class TokenModel:
    """A model whose handler takes and yields token ids."""

    def __init__(
        self, runtime: DistributedRuntime, card: ModelCard, config: ModelRuntimeConfig
    ) -> None:
        self._runtime = runtime
        self._card = card
        self._config = config
        self._worker: EngineWorker | None = None

    async def serve(self, handler: Handler) -> None:
        """Announce the model's card with an engine that calls `handler`."""
        runtime, config = self._runtime, self._config
        tokenizer = await runtime.clock.offload(load_tokenizer, self._card.tokenizer_file)
        start, _ = bind_handler(handler)
        engine = HandlerEngine(
            start,
            self._card,
            tokenizer.encode,
            max_num_seqs=config.max_num_seqs or 0,
            num_blocks=config.total_kv_blocks or 0,
        )
        (await open_model_store(runtime)).offer_file(self._card.tokenizer_file)
        worker = EngineWorker(engine, self._card)
        try:
            await worker.attach(runtime)
        except BaseException:
            await worker.close()
            raise
        self._worker = worker
        runtime.add_shutdown_hook(worker.close)
        runtime.tasks.start(FrontendNamespaces(runtime).run(), "frontend namespaces")

    async def withdraw(self) -> None:
        """Leave discovery, and answer what has begun."""
        if self._worker is not None:
            await self._worker.close(self._runtime.settings.runtime.drain_s)


class TextModel:
    """A model whose handler takes OpenAI's chat requests and yields its chunks."""

    def __init__(self, endpoint: CompatEndpoint, name: str) -> None:
        component = endpoint.native.component
        self._runtime = endpoint.runtime.native
        self._key = service_model_key(
            self._runtime.settings.runtime.namespace, name, self._runtime.instance_id
        )
        self._record = ServiceModelRecord(
            model=name,
            namespace=component.namespace.name,
            component=component.name,
            endpoint=endpoint.native.name,
            streams=True,
            derived=False,
        )

    async def serve(self, handler: Handler) -> None:
        """Announce the model. Its endpoint serves the handler already."""
        del handler
        await self._runtime.discovery.put(self._key, msgspec.json.encode(self._record))

    async def withdraw(self) -> None:
        """Leave discovery."""
        await self._runtime.discovery.delete(self._key)


async def register_model(
    model_input: ModelInput,
    model_type: ModelType,
    endpoint: CompatEndpoint,
    model_path: str,
    model_name: str | None = None,
    *,
    context_length: int | None = None,
    kv_cache_block_size: int | None = None,
    runtime_config: ModelRuntimeConfig | None = None,
    custom_template_path: str | None = None,
    worker_type: WorkerType | None = None,
    needs: Any = None,
    lora_name: str | None = None,
    model_aliases: list[str] | None = None,
    **options: Any,
) -> None:
    """Serve a model by the handler of `endpoint`, which may be served before or after.

    A model whose handler cannot be served is not registered. Raises `Unsupported` for other inputs,
    types and roles, and `ModelUnavailable`.
    """
    _check_options(options)
    _check_kind(model_input, model_type, worker_type, needs, lora_name)
    runtime = endpoint.runtime
    await runtime.ready()
    _check_free(endpoint)
    config = runtime_config or ModelRuntimeConfig()
    model: RegisteredModel
    if model_input is ModelInput.Text:
        model = TextModel(endpoint, model_name or model_path)
    else:
        files = await resolve_model(model_path, with_weights=False, clock=runtime.native.clock)
        card = files.build_card(
            names=(model_name or files.name, *(model_aliases or ())),
            context_tokens=context_length or config.context_length or 0,
            block_tokens=kv_cache_block_size or 16,
            tool_format=_tool_format(config),
        )
        if custom_template_path:
            template = await runtime.native.clock.offload(
                partial(Path(custom_template_path).read_text, encoding="utf-8")
            )
            card = msgspec.structs.replace(card, chat_template=template, tool_template=None)
        model = TokenModel(runtime.native, card, config)
    await _register(endpoint, model)


async def _register(endpoint: CompatEndpoint, model: RegisteredModel) -> None:
    """Register a model, and serve it if its handler is served already."""
    _check_free(endpoint)
    runtime, path = endpoint.runtime, endpoint.native.path
    runtime.models[path] = model
    if handler := runtime.handlers.get(path):
        try:
            await model.serve(handler)
        except BaseException:
            del runtime.models[path]
            raise


def _check_free(endpoint: CompatEndpoint) -> None:
    if (path := endpoint.native.path) in endpoint.runtime.models:
        raise ConfigError(f"{path} has a model already", hint="call unregister_model first")


async def unregister_model(endpoint: CompatEndpoint, lora_name: str | None = None) -> None:
    """Take the model of an endpoint back. Raises `Unsupported` for a LoRA adapter."""
    if lora_name:
        raise _no_adapters()
    model = endpoint.runtime.models.pop(endpoint.native.path, None)
    if model is not None:
        await model.withdraw()


async def fetch_model(remote_name: str, ignore_weights: bool = False) -> str:
    """Find or download a model. Returns its folder or file. Raises `ModelUnavailable`."""
    files = await resolve_model(remote_name, with_weights=not ignore_weights)
    return str(files.path)


def _check_options(options: dict[str, Any]) -> None:
    unknown = options.keys() - WITHOUT_EFFECT
    if unknown:
        raise TypeError(f"register_model has no argument {', '.join(sorted(unknown))}")
    if names := sorted(name for name, value in options.items() if value):
        fields = {"arguments": ", ".join(names)}
        log.info("register_model: arguments without effect", extra={"fields": fields})


def _check_kind(
    model_input: ModelInput,
    model_type: ModelType,
    worker_type: WorkerType | None,
    needs: Any,
    lora_name: str | None,
) -> None:
    if model_input is ModelInput.Tensor:
        raise Unsupported("handlers of tensors do not exist here", hint="use ModelInput.Tokens")
    wanted = (
        ModelType.Chat if model_input is ModelInput.Text else ModelType.Chat | ModelType.Completions
    )
    if not model_type & wanted:
        raise Unsupported(
            f"{model_type} of {model_input} is not served by handlers here",
            hint="register ModelType.Chat; embedding models are served by `dynamo run MODEL`",
        )
    if worker_type not in {None, WorkerType.Aggregated} or needs:
        raise Unsupported(
            f"a handler answers requests alone here, and not as {worker_type} with others",
            hint="disaggregate with the engines of `dynamo run --prefill-workers`",
        )
    if lora_name:
        raise _no_adapters()


def _no_adapters() -> Unsupported:
    return Unsupported(
        "handlers have no LoRA adapters here", hint="register the adapter as a model of its own"
    )


def _tool_format(config: ModelRuntimeConfig) -> str:
    """Return the family of the config's parser of tool calls, or "" for that of the template."""
    name = config.tool_call_parser or ""
    try:
        return find_family(name).name if name else ""
    except ConfigError as error:
        fields = {"tool_call_parser": name, "hint": error.hint}
        log.warning("the chat template chooses the tool format", extra={"fields": fields})
        return ""
