"""The engine that serves a model, chosen by its files, the machine and what is installed."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from dynamo.core.errors import ConfigError, DynamoError, ModelUnavailable
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_engine import AUTO
from dynamo.inference.engines.arguments import check_roles, engine_arguments
from dynamo.inference.engines.model_facts import ModelFacts, read_model_facts
from dynamo.inference.engines.packages import (
    CARD_ENGINES,
    ENGINE_PACKAGES,
    engine_status,
    has_nvidia_driver,
)
from dynamo.inference.native.engine_sizing import available_memory_bytes, plan_kv_bytes
from dynamo.inference.native.kv_storage import FLOAT_BYTES, KvShape
from dynamo.inference.tiers.opening import memory_above_host

log = logging.getLogger(__name__)

NATIVE, LLAMACPP, VLLM = "native", "llamacpp", "vllm"
ON_REQUEST = {
    "mock": "simulates an engine: out=mock",
    "echo": "repeats the prompt: out=echo",
    "script": "answers by a script: out=script",
    "openai": "passes requests to a server that has the model: out=openai URL",
}
"""Engines that are used only if they are named."""
_TEXT_CLASSES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_NO_TEXT_CLASSES = frozenset({
    "T5ForConditionalGeneration", "MT5ForConditionalGeneration", "UMT5ForConditionalGeneration",
    "WhisperForConditionalGeneration", "MarianMTModel",
})  # fmt: skip
_NO_TEXT_FILES = frozenset({
    "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2",
    "jina-bert-v3", "gemma-embedding", "llama-embed", "t5", "t5encoder", "clip", "whisper",
    "wavtokenizer-dec", "flux", "sd1", "sd3", "sdxl", "wan", "ltxv", "hidream", "lumina2",
    "qwen_image", "cosmos", "aura",
})  # fmt: skip
"""Architectures of GGUF files with which llama.cpp's server does not continue a text."""
_CPU_QUANTIZATIONS = frozenset({"", "awq", "gptq", "compressed-tensors"})
"""Packed weights that vLLM computes on a CPU."""
_OTHER_SERVER = "`dynamo run out=openai URL` serves what another server has loaded"


class EngineOffer(msgspec.Struct, frozen=True):
    """Tells whether an engine serves a model on this machine.

    - `problem`: why it does not serve the model here; "": it does.
    - `command`: serves the model, or installs what the engine lacks.
    - `would_serve`: model and machine suit the engine, which only has to be installed.
    - `memory_bytes`: of the weights; 0 if unknown.
    """

    kind: str
    problem: str = ""
    command: str = ""
    would_serve: bool = False
    memory_bytes: int = 0


class EngineChoice(msgspec.Struct, frozen=True):
    """The engine for a model, and why."""

    kind: str
    model: str
    reason: str


_choices: dict[str, EngineChoice] = {}
"""The choices of this process by model. A reload keeps them: a worker that runs takes memory, so
that another choice would follow."""


def chosen_engine(settings: Settings) -> EngineChoice:
    """Return the engine for the settings' model. The process chooses once for each model. Blocks.

    Raises `ModelUnavailable` or `ConfigError` if no engine that is installed serves it; the hint is
    a command that installs one, if there is one.
    """
    spec = settings.model.path
    if spec not in _choices:
        _choices[spec] = choose_engine(settings)
    return _choices[spec]


def with_engine(settings: Settings) -> Settings:
    """Return the settings with the engine of their model, if they leave it open. Blocks, and raises
    as `chosen_engine`."""
    if settings.engine.kind != AUTO:
        return settings
    kind = "openai" if settings.engine.urls else chosen_engine(settings).kind
    return replace(settings, engine=replace(settings.engine, kind=kind))


def log_choices() -> None:
    """Log the engines that this process has chosen."""
    for choice in _choices.values():
        fields = {"engine": choice.kind, "model": choice.model, "reason": choice.reason}
        log.info("engine is chosen", extra={"fields": fields})


def choose_engine(settings: Settings) -> EngineChoice:
    """Choose the first engine of `offers` that serves the model. Raises as `chosen_engine`."""
    facts = read_model_facts(settings.model.path)
    if facts.is_builtin or not facts.computes_text:
        return EngineChoice(NATIVE, facts.name, "it computes this model")
    offers = list(_offers(settings, facts))
    refusals: list[tuple[str, str]] = []
    for offer in offers:
        if not offer.problem:
            if not facts.has_weights:
                raise _no_weights_error(facts, offer.kind)
            reason = "; ".join(f"{kind}: {problem}" for kind, problem in refusals)
            reason = reason or "the first engine, and it serves this model"
            return EngineChoice(offer.kind, facts.name, reason)
        refusals.append((offer.kind, offer.problem))
    raise _refusal(settings, facts, offers)


def engine_offers(settings: Settings, facts: ModelFacts) -> list[EngineOffer]:
    """Return what each engine does with a model here, in the order in which they are chosen."""
    if facts.is_builtin or not facts.computes_text:
        text = f"it is not offered {facts.name}, which native computes"
        native = EngineOffer(NATIVE, command=_run_command(NATIVE, facts), would_serve=True)
        offers = [native, *(EngineOffer(kind, text) for kind in ENGINE_PACKAGES)]
    else:
        offers = list(_offers(settings, facts))
    return [*offers, *(EngineOffer(kind, text) for kind, text in ON_REQUEST.items())]


def _offers(settings: Settings, facts: ModelFacts) -> Iterator[EngineOffer]:
    """Yield the offers of the engines that compute. Folders go to a card first, where one is."""
    own, foreign = (NATIVE, LLAMACPP), tuple(kind for kind in ENGINE_PACKAGES if kind != LLAMACPP)
    on_card = has_nvidia_driver() and not facts.is_gguf
    for kind in (*foreign, *own) if on_card else (*own, *foreign):
        memory_bytes = facts.stored_bytes
        if kind == NATIVE:
            memory_bytes = FLOAT_BYTES * facts.config.count_weights() if facts.config else 0
        problem, command = _model_problem(settings, facts, kind), ""
        would_serve = not problem
        if would_serve:
            status = engine_status(kind) if kind in ENGINE_PACKAGES else None
            problem = status.problem if status else ""
            command = status.command if status and problem else _run_command(kind, facts)
        yield EngineOffer(kind, problem, command, would_serve, memory_bytes)


def _model_problem(settings: Settings, facts: ModelFacts, kind: str) -> str:
    """Return why an engine cannot serve the model here, were it installed; "" if it can."""
    if kind == NATIVE:
        error = _native_error(settings, facts)
        problem = error.message if error else ""
    else:
        problem = _foreign_problem(facts, kind) or _memory_problem(settings, facts, kind)
    if problem:
        return problem
    settings = replace(settings, engine=replace(settings.engine, kind=kind))
    try:
        check_roles(settings)
        engine_arguments(settings)
    except ConfigError as error:
        return error.message
    return ""


def _native_error(settings: Settings, facts: ModelFacts) -> DynamoError | None:
    """Return why native does not compute the model, or does not have the memory for it."""
    config, engine = facts.config, settings.engine
    if config is None or engine.num_blocks or settings.cache.max_cache_size:
        return facts.native_error
    ranks = engine.data_parallel_size
    context = min(settings.model.context_tokens or config.context_tokens, config.context_tokens)
    try:
        plan_kv_bytes(
            memory_above_host(
                settings.cache, ranks, available_memory_bytes(settings.worker_count) // ranks
            ),
            FLOAT_BYTES * config.count_weights(),
            KvShape(config.num_layers, config.num_kv_heads, config.head_dim),
            context,
        )
    except ConfigError as error:
        return error
    return None


def _memory_problem(settings: Settings, facts: ModelFacts, kind: str) -> str:
    """Return that packed weights do not fit into the memory of the machine, or ""."""
    free = available_memory_bytes(settings.worker_count)
    if facts.stored_bytes <= free or (kind in CARD_ENGINES and has_nvidia_driver()):
        return ""
    return (
        f"the weights take {facts.stored_bytes / 1e9:.1f} GB, and a worker may use "
        f"{free / 1e9:.1f} GB of memory"
    )


def _foreign_problem(facts: ModelFacts, kind: str) -> str:
    """Return why a foreign engine does not serve this model on a machine of this kind."""
    title = ENGINE_PACKAGES[kind].title
    if kind == LLAMACPP:
        if not facts.is_gguf:
            return "llama.cpp reads GGUF files, and this is a folder"
        if facts.architecture in _NO_TEXT_FILES:
            return f"llama.cpp generates no text with the architecture {facts.architecture!r}"
        return ""
    if facts.is_gguf:
        return f"{title} reads folders, and this is a GGUF file"
    if not (facts.architecture or facts.classes):
        return f"{title} needs a config.json that names the type of the model"
    if facts.classes and not any(map(_generates_text, facts.classes)):
        return f"{title} generates no text with {', '.join(facts.classes)}"
    if has_nvidia_driver():
        return ""
    if kind != VLLM:
        return f"{title} needs an NVIDIA GPU, and this machine has no driver of one"
    if facts.quantization not in _CPU_QUANTIZATIONS:
        return f"vLLM needs a GPU for weights that {facts.quantization} has packed"
    return ""


def _generates_text(name: str) -> bool:
    return name.endswith(_TEXT_CLASSES) and name not in _NO_TEXT_CLASSES


def _no_weights_error(facts: ModelFacts, kind: str) -> ModelUnavailable:
    if facts.is_gguf:
        return ModelUnavailable(
            f"{facts.name} is damaged: the file ends before its weights",
            hint=f"fetch the file again; {kind} would serve it",
        )
    return ModelUnavailable(
        f"{facts.name} has no weights in safetensors format",
        hint=f"{kind} would serve them; the mock and echo engines need none",
    )


def _refusal(settings: Settings, facts: ModelFacts, offers: list[EngineOffer]) -> DynamoError:
    """Return the error for a model that no installed engine serves."""
    native = next(offer.problem for offer in offers if offer.kind == NATIVE)
    if missing := next((offer for offer in offers if offer.would_serve), None):
        return ModelUnavailable(
            f"{native}; {missing.kind} would serve it: {missing.problem}", hint=missing.command
        )
    if not facts.is_gguf and _generates_text((*facts.classes, "")[0]) and not has_nvidia_driver():
        command = shlex.join(["pip", "install", ENGINE_PACKAGES[VLLM].requirement])
        return ModelUnavailable(
            f"{native}; vLLM serves it on a machine with an NVIDIA GPU or with more memory",
            hint=f"there: {command}; here, {_OTHER_SERVER}",
        )
    if facts.config is None:
        nearest = (NATIVE, LLAMACPP if facts.is_gguf else VLLM)
        problems = (offer.problem for offer in offers if offer.kind in nearest)
        return ModelUnavailable(
            f"no engine serves {facts.name}: {'; '.join(problems)}", hint=_OTHER_SERVER
        )
    return _native_error(settings, facts) or ModelUnavailable(native, hint=_OTHER_SERVER)


def _run_command(kind: str, facts: ModelFacts) -> str:
    return shlex.join(["dynamo", "run", f"out={kind}", *([facts.spec] if facts.spec else [])])
