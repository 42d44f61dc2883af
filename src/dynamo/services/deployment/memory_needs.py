"""The memory that workers need: that of their models' weights, of a small cache, and the rest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from msgspec.structs import replace

from dynamo.core.errors import ConfigError, DynamoError
from dynamo.core.plugins import engine_needs_weights
from dynamo.core.settings import Settings
from dynamo.core.settings.server_url import lacks_tokenizer
from dynamo.inference.engines.model_facts import ModelFacts, read_model_facts
from dynamo.inference.native.engine_sizing import KV_MEMORY_SHARE, available_memory_bytes
from dynamo.inference.native.kv_storage import FLOAT_BYTES, KvShape
from dynamo.models.location import computes_embeddings, locate_model
from dynamo.runtime.processes.child_spec import ChildSpec, MemoryNeed
from dynamo.runtime.processes.host_memory import HostMemory, needed_bytes
from dynamo.services.deployment.accelerators import cards_needed

log = logging.getLogger(__name__)

PROCESS_BYTES = 64 << 20
"""A worker without weights and with empty KV blocks, which take memory when they are written."""
SUPERVISOR_BYTES = 64 << 20
"""The supervisor, and the process from which workers are forked."""
SERVICE_BYTES = 36 << 20
"""A frontend without tokenizers, a router, or the observer."""
VOCABULARY_ENTRY_BYTES = 832
"""The memory of a tokenizer for each token that it knows."""
DEFAULT_VOCABULARY = 1 << 17
"""The size of a vocabulary that cannot be read yet."""
NEEDED_TOKENS = 4096
"""The cache of a model holds so many tokens at least, or a whole context."""
MEMORY_HINT = "serve fewer or smaller models, or load some with load: on_demand"
CACHE_SHARE = 2 * KV_MEMORY_SHARE
"""Share of the memory that is left which caches get, for blocks and areas of running sequences. The
rest is for workers and models that are added."""
HOST_SHARE = 0.9
"""Share of the free memory of the host that workers may use together."""


@cache
def host_memory_bytes() -> int:
    """Return what the workers of this process may use together: what was free at the first call."""
    return int(HOST_SHARE * available_memory_bytes())


def with_memory(specs: Sequence[ChildSpec], limit_bytes: int = 0) -> Sequence[ChildSpec]:
    """Return processes with the memory that their workers need. Of what a limit leaves,
    workers without `memory` get a share by need, for their caches. Without a limit, those that are
    on demand get what they need, and others decide. Blocks. Raises `ConfigError`."""
    workers = [spec for spec in specs if spec.role == "worker"]
    needs = {spec.name: _need_of(spec.settings) for spec in workers}
    weights = {need.shared_key: need.shared_bytes for need in needs.values()}
    growing = [
        needs[spec.name].own_bytes for spec in workers if _grows(spec.settings, needs[spec.name])
    ]
    fixed = sum(need.own_bytes for need in needs.values()) - sum(growing)
    rest = limit_bytes - sum(weights.values()) - fixed - sum(growing)
    factor = 1 + max(0.0, CACHE_SHARE * rest / sum(growing)) if growing else 1.0
    return [
        _with_need(spec, needs[spec.name], factor, sized=bool(limit_bytes) or spec.on_demand)
        if spec.name in needs
        else spec
        for spec in specs
    ]


def share_memory(
    settings: Settings, processes: Sequence[ChildSpec]
) -> tuple[Settings, Sequence[ChildSpec]]:
    """Return processes with their memory, and the settings with the limit of workers together, if
    one is on demand or there are several models. Raises `ConfigError` for a model that never fits
    beside those that are always loaded. Blocks."""
    workers = [spec for spec in processes if spec.role == "worker"]
    wanted = dict.fromkeys(spec.model for spec in workers if spec.on_demand)
    if not wanted and len({spec.model for spec in workers}) < 2:
        return settings, processes
    limit_bytes, hint = settings.runtime.memory, MEMORY_HINT
    if not limit_bytes:
        own_bytes, free_bytes = own_processes_bytes(processes), host_memory_bytes()
        limit_bytes = max(free_bytes - own_bytes, free_bytes // 2)
        hint = (
            f"{hint}; of {free_bytes >> 20} MiB, {own_bytes >> 20} MiB are for supervisor, "
            "frontends and observer"
        )
    processes = with_memory(processes, limit_bytes)
    memory, always = HostMemory(limit_bytes), [spec for spec in processes if not spec.on_demand]
    if lack := memory.lack_of(always, ()):
        raise ConfigError(f"the models do not fit together: {lack}", hint=hint)
    for model in wanted:
        own = [spec for spec in processes if spec.on_demand and spec.model == model]
        if lack := memory.lack_of(own, always):
            raise ConfigError(f"{model} never fits beside what is always loaded: {lack}", hint=hint)
    _log_plan(processes, limit_bytes)
    return replace(settings, runtime=replace(settings.runtime, memory=limit_bytes)), processes


def _log_plan(processes: Sequence[ChildSpec], limit_bytes: int) -> None:
    models: dict[str, list[ChildSpec]] = {}
    for spec in processes:
        if spec.memory.own_bytes:
            models.setdefault(spec.model, []).append(spec)
    needs = [f"{model} {needed_bytes(specs) >> 20} MiB" for model, specs in models.items()]
    fields = {
        "workers": f"{limit_bytes >> 20} MiB",
        "models": ", ".join(needs),
        "others": f"{own_processes_bytes(processes) >> 20} MiB",
    }
    log.info("memory is planned", extra={"fields": fields})


def own_processes_bytes(processes: Sequence[ChildSpec]) -> int:
    """Return the memory of what a deployment runs beside its workers. Each frontend has the
    tokenizers of all models, one for those that have the same. Blocks."""
    models = {
        spec.settings.model.path: spec.settings for spec in processes if spec.role == "worker"
    }
    vocabularies = dict(map(_vocabulary, models.values()))
    tokenizer_bytes = VOCABULARY_ENTRY_BYTES * sum(vocabularies.values())
    others = [spec.role for spec in processes if spec.role != "worker"]
    return (
        SUPERVISOR_BYTES + SERVICE_BYTES * len(others) + tokenizer_bytes * others.count("frontend")
    )


def _vocabulary(settings: Settings) -> tuple[tuple[int, int], int]:
    """Return what equal tokenizers have in common, and the number of tokens."""
    if lacks_tokenizer(settings):
        return (0, 0), 0
    size, file_bytes = DEFAULT_VOCABULARY, 0
    with suppress(DynamoError, OSError):
        path = locate_model(settings.model.path).path
        if path is not None and (config := read_model_facts(settings.model.path).config):
            size = config.vocab_size
            file_bytes = 0 if path.is_file() else (path / "tokenizer.json").stat().st_size
    return (size, file_bytes), size


def _need_of(settings: Settings) -> MemoryNeed:
    """Return the memory of a worker. Workers of the native engine share the weights of their model,
    and those of llama.cpp its file. Raises `ConfigError` for less `memory` than that."""
    weights, kv_bytes = _weights_and_cache(settings)
    kind, path = settings.engine.kind, settings.model.path
    own_bytes = PROCESS_BYTES + 2 * kv_bytes  # blocks, and the areas of running sequences
    if memory := settings.model.memory:
        if memory < own_bytes + weights and kind == "native":
            raise ConfigError(
                f"memory is {memory >> 20} MiB, and a worker of {path or 'the default model'} "
                f"needs {own_bytes + weights >> 20} MiB: {weights >> 20} MiB of weights and the "
                f"cache of {NEEDED_TOKENS} tokens",
                hint="raise it, or leave it out",
                param="model.memory",
            )
        own_bytes = memory - (weights if kind in {"native", "llamacpp"} else 0)
    elif kind not in {"native", "llamacpp"}:
        return MemoryNeed(own_bytes + weights)
    return MemoryNeed(own_bytes, weights, f"{kind} {path}" if weights else "")


def _weights_and_cache(settings: Settings) -> tuple[int, int]:
    """Return the bytes of a model's weights on this host, and those of a small cache. Both are 0 on
    a card, at a server, and for a model that was not fetched yet."""
    kind = settings.engine.kind
    if not engine_needs_weights(kind) or lacks_tokenizer(settings) or cards_needed(settings):
        return 0, 0
    try:
        location = locate_model(settings.model.path)
        if location.path is None:
            return 0, 0
        if computes_embeddings(settings.model.path):
            files = location.path.glob("*.safetensors")
            return sum(file.stat().st_size for file in files), 0
        return _decoder_bytes(settings, read_model_facts(settings.model.path))
    except (DynamoError, OSError):
        return 0, 0  # the worker says what is wrong


def _decoder_bytes(settings: Settings, facts: ModelFacts) -> tuple[int, int]:
    config, stored_bytes = facts.config, facts.stored_bytes
    if config is None:
        return stored_bytes, 0
    shape = KvShape(config.num_layers, config.num_kv_heads, config.head_dim)
    context = min(settings.model.context_tokens or config.context_tokens, config.context_tokens)
    tokens = min(context, NEEDED_TOKENS)
    if settings.engine.num_blocks:
        tokens = settings.engine.num_blocks * settings.engine.block_size
    kv_bytes = settings.cache.max_cache_size or tokens * shape.token_bytes
    if settings.engine.kind == "native":
        stored_bytes = FLOAT_BYTES * config.count_weights()
    return stored_bytes, kv_bytes


def _grows(settings: Settings, need: MemoryNeed) -> bool:
    """Whether a worker can use more memory for its cache than it needs."""
    sized = settings.engine.num_blocks or settings.cache.max_cache_size or settings.model.memory
    return not sized and need.own_bytes > PROCESS_BYTES and bool(need.shared_bytes)


def _with_need(spec: ChildSpec, need: MemoryNeed, factor: float, *, sized: bool) -> ChildSpec:
    settings = spec.settings
    if _grows(settings, need):
        need = replace(need, own_bytes=int(need.own_bytes * factor))
    if (
        sized
        and need.shared_bytes
        and not (settings.engine.num_blocks or settings.cache.max_cache_size)
    ):
        kv_bytes = (need.own_bytes - PROCESS_BYTES) // 2
        if settings.engine.kind == "native" and kv_bytes > 0:
            cache_settings = replace(settings.cache, max_cache_size=kv_bytes)
            settings = replace(settings, cache=cache_settings)
    return replace(spec, memory=need, settings=settings)


def check_standby_memory(specs: Sequence[ChildSpec]) -> None:
    """Raise `ConfigError` for standby processes that the free memory does not hold."""
    sizes = [_standby_bytes(spec.settings) for spec in specs if spec.standby]
    if not sizes or sum(sizes) <= (free := available_memory_bytes()):
        return
    raise ConfigError(
        f"{len(sizes)} standby processes would hold {sum(sizes) >> 20} MiB, and {free >> 20} MiB "
        "of memory are free",
        hint=f"lower --standby: there is room for {int(len(sizes) * free / sum(sizes))} in all",
        param="engine.standby",
    )


def _standby_bytes(settings: Settings) -> int:
    """Estimate what one holds. Workers of the native engine share their weights; others each load
    the files of their model, as far as these are here."""
    kind, path = settings.engine.kind, settings.model.path
    if kind == "native" or not (path and engine_needs_weights(kind)):
        return PROCESS_BYTES
    files = [Path(path), *Path(path).glob("*")]
    return PROCESS_BYTES + sum(file.stat().st_size for file in files if file.is_file())
