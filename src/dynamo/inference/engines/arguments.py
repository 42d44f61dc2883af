"""Arguments of foreign engines: one table per engine, from the names of settings to its own names.

A setting at its default passes nothing, so that the engine's own default holds. `engine.args`
passes any further argument, with precedence over the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.core.settings.keys import setting_specs_by_key
from dynamo.inference.engines.packages import (
    ENGINE_PACKAGES,
    MissingPackage,
    check_argument_name,
    package_kind,
)

LLAMACPP_SLOTS = 8
"""Sequences that llama.cpp computes at once, each with a context of its own."""
ENGINE_ARGS_KEY = "engine.args"
OWNED_ARGUMENTS: Mapping[str, Sequence[str]] = {
    "vllm": ("kv_events_config", "kv_transfer_config"),
    "sglang": ("kv_events_config", "disaggregation_mode"),
}
"""Arguments that an adapter computes."""
ENGINES_WITH_ROLES = ("native", "mock")
"""Engines whose workers fetch KV blocks from each other."""
ENGINES_WITH_CONNECTORS = ("vllm",)
"""Engines that move KV to each other by themselves, if they are started for that."""


class PassedSetting(msgspec.Struct, frozen=True):
    """A setting that an engine has under the argument `name`; a dot leads into a structure.

    `values` translates values, `refused` maps values that the engine lacks to what helps.
    `convert(settings, value)` computes the argument where it depends on other settings.
    """

    name: str
    values: Mapping[Any, Any] = {}
    refused: Mapping[Any, str] = {}
    convert: Callable[[Settings, Any], Any] | None = None


class IgnoredSetting(msgspec.Struct, frozen=True):
    """A setting that an engine lacks, without which its answers stay the same."""

    reason: str


class RefusedSetting(msgspec.Struct, frozen=True):
    """A setting that an engine lacks and that changes answers. `hint` says what to use."""

    hint: str


Row = PassedSetting | IgnoredSetting | RefusedSetting


class EngineArgument(msgspec.Struct, frozen=True):
    """A setting beside what becomes of it: the argument `name` with `value`, or a `note`."""

    key: str
    name: str = ""
    value: Any = None
    note: str = ""


def _as_tokens(settings: Settings, blocks: int) -> int:
    return blocks * settings.engine.block_size


def _llamacpp_slots(settings: Settings) -> int:
    return settings.engine.max_num_seqs or LLAMACPP_SLOTS


_SQUEEZELLM = {
    "squeezellm": "no engine loads these weights any more: use an awq or gptq version of the model"
}
_KV_BYTES_HINT = "set engine.gpu_memory_utilization or engine.num_blocks"

_NATIVE_DEVICE = IgnoredSetting("only the native engine reads it")
_NO_LORA: Mapping[str, Row] = {
    "engine.lora_modules": RefusedSetting("vllm has LoRA adapters: out=vllm; mock imitates them"),
    "engine.lora_updates": IgnoredSetting("only vllm and mock have LoRA adapters"),
}

VLLM: Mapping[str, Row] = {
    "model.context_tokens": PassedSetting("max_model_len"),
    "engine.tensor_parallel_size": PassedSetting("tensor_parallel_size"),
    "engine.pipeline_parallel_size": PassedSetting("pipeline_parallel_size"),
    "engine.data_parallel_size": PassedSetting("data_parallel_size"),
    "engine.gpu_memory_utilization": PassedSetting("gpu_memory_utilization"),
    "engine.num_blocks": PassedSetting("num_gpu_blocks_override"),
    "cache.max_cache_size": PassedSetting("kv_cache_memory_bytes"),
    "engine.block_size": PassedSetting("block_size"),
    "engine.max_num_seqs": PassedSetting("max_num_seqs"),
    "engine.max_num_batched_tokens": PassedSetting("max_num_batched_tokens"),
    "engine.prefix_caching": PassedSetting("enable_prefix_caching"),
    "engine.device": _NATIVE_DEVICE,
    "engine.dtype": PassedSetting("dtype"),
    "engine.kv_cache_dtype": PassedSetting("kv_cache_dtype", {"fp16": "float16"}),
    "engine.quantization": PassedSetting("quantization", refused=_SQUEEZELLM),
    "engine.lora_modules": PassedSetting("enable_lora", convert=lambda *_: True),
    "engine.lora_updates": PassedSetting("enable_lora", convert=lambda *_: True),
    "engine.swap_space": IgnoredSetting(
        "vLLM computes a swapped sequence again; --engine-arg kv_offloading_size=GIB keeps KV "
        "blocks in host memory"
    ),
}
"""Arguments of `AsyncEngineArgs`."""

SGLANG: Mapping[str, Row] = {
    **_NO_LORA,
    "model.context_tokens": PassedSetting("context_length"),
    "engine.tensor_parallel_size": PassedSetting("tp_size"),
    "engine.pipeline_parallel_size": PassedSetting("pp_size"),
    "engine.data_parallel_size": PassedSetting("dp_size"),
    "engine.gpu_memory_utilization": PassedSetting("mem_fraction_static"),
    "engine.num_blocks": PassedSetting("max_total_tokens", convert=_as_tokens),
    "cache.max_cache_size": IgnoredSetting(_KV_BYTES_HINT),
    "engine.block_size": PassedSetting("page_size"),
    "engine.max_num_seqs": PassedSetting("max_running_requests"),
    "engine.max_num_batched_tokens": PassedSetting("chunked_prefill_size"),
    "engine.prefix_caching": PassedSetting(
        "disable_radix_cache", convert=lambda _, value: not value
    ),
    "engine.device": _NATIVE_DEVICE,
    "engine.dtype": PassedSetting("dtype"),
    "engine.kv_cache_dtype": PassedSetting(
        "kv_cache_dtype",
        {"fp8": "fp8_e4m3"},
        {"fp16": "use auto, which is the format of the weights"},
    ),
    "engine.quantization": PassedSetting("quantization", refused=_SQUEEZELLM),
    "engine.swap_space": IgnoredSetting(
        "SGLang computes a swapped sequence again; --engine-arg enable_hierarchical_cache=true "
        "keeps KV blocks in host memory"
    ),
}
"""Arguments of `ServerArgs`."""

TRTLLM: Mapping[str, Row] = {
    **_NO_LORA,
    "model.context_tokens": PassedSetting("max_seq_len"),
    "engine.tensor_parallel_size": PassedSetting("tensor_parallel_size"),
    "engine.pipeline_parallel_size": PassedSetting("pipeline_parallel_size"),
    "engine.data_parallel_size": RefusedSetting(
        "use --workers; attention ranks are --engine-arg enable_attention_dp=true with "
        "--tensor-parallel-size"
    ),
    "engine.gpu_memory_utilization": PassedSetting("kv_cache_config.free_gpu_memory_fraction"),
    "engine.num_blocks": PassedSetting("kv_cache_config.max_tokens", convert=_as_tokens),
    "cache.max_cache_size": IgnoredSetting(_KV_BYTES_HINT),
    "engine.block_size": PassedSetting("kv_cache_config.tokens_per_block"),
    "engine.max_num_seqs": PassedSetting("max_batch_size"),
    "engine.max_num_batched_tokens": PassedSetting("max_num_tokens"),
    "engine.prefix_caching": PassedSetting("kv_cache_config.enable_block_reuse"),
    "engine.device": _NATIVE_DEVICE,
    "engine.dtype": PassedSetting("dtype"),
    "engine.kv_cache_dtype": PassedSetting(
        "kv_cache_config.dtype", refused={"fp16": "use auto, which is the format of the weights"}
    ),
    "engine.quantization": IgnoredSetting("TensorRT-LLM reads the format from the model's files"),
    "engine.swap_space": PassedSetting(
        "kv_cache_config.host_cache_size", convert=lambda _, gibibytes: int(gibibytes * (1 << 30))
    ),
}
"""Arguments of `LLM`."""

LLAMACPP: Mapping[str, Row] = {
    **_NO_LORA,
    "model.context_tokens": PassedSetting(
        "n_ctx",
        convert=lambda settings, context: context * _llamacpp_slots(settings),
    ),
    "engine.tensor_parallel_size": IgnoredSetting(
        "llama.cpp spreads a model over its devices by itself"
    ),
    "engine.pipeline_parallel_size": IgnoredSetting(
        "llama.cpp spreads a model over its devices by itself"
    ),
    "engine.data_parallel_size": RefusedSetting("use --workers"),
    "engine.gpu_memory_utilization": IgnoredSetting("--engine-arg n_gpu_layers=N limits the share"),
    "engine.num_blocks": IgnoredSetting("llama.cpp has no blocks: set model.context_tokens"),
    "cache.max_cache_size": IgnoredSetting("set model.context_tokens and engine.max_num_seqs"),
    "engine.block_size": IgnoredSetting("llama.cpp has no blocks; routers count in this size"),
    "engine.max_num_seqs": PassedSetting("n_parallel"),
    "engine.max_num_batched_tokens": PassedSetting("n_batch"),
    "engine.prefix_caching": PassedSetting("cache_prompt"),
    "engine.dtype": RefusedSetting("give a GGUF file in the wanted format"),
    "engine.kv_cache_dtype": PassedSetting(
        "cache_type_k",
        {"fp16": 1},  # the number of the type in ggml
        {"fp8": "use 8 bits: --engine-arg cache_type_k=8 --engine-arg cache_type_v=8"},
    ),
    "engine.device": _NATIVE_DEVICE,
    "engine.quantization": RefusedSetting("give a GGUF file in the wanted format"),
    "engine.swap_space": IgnoredSetting("llama.cpp keeps waiting sequences in their slots"),
    "engine.threads": PassedSetting("cpuparams.n_threads"),
}
"""Attributes of `CommonParams`."""

_ON_CPU = IgnoredSetting("this engine computes on the CPU, in one process")
OWN: Mapping[str, Row] = {
    **_NO_LORA,
    "engine.tensor_parallel_size": _ON_CPU,
    "engine.pipeline_parallel_size": _ON_CPU,
    "engine.device_ids": _ON_CPU,
    "engine.gpu_memory_utilization": _ON_CPU,
    "engine.swap_space": IgnoredSetting("cache.cpu_size keeps KV blocks in host memory"),
    "engine.kv_cache_dtype": IgnoredSetting("the KV cache keeps its full precision"),
    "engine.quantization": RefusedSetting("use --engine.kind vllm; native reads GGUF formats"),
}
"""Rows of echo, which reads all other settings by their names."""
MOCK: Mapping[str, Row] = {key: row for key, row in OWN.items() if key not in _NO_LORA}
NATIVE: Mapping[str, Row] = {
    key: row
    for key, row in OWN.items()
    if key
    not in {
        "engine.device_ids",
        "engine.gpu_memory_utilization",
        "engine.tensor_parallel_size",
    }
}
"""Rows of native, which also computes on a card."""

_AT_THE_SERVER = IgnoredSetting("set it where the server is started")
OPENAI: Mapping[str, Row] = {
    **dict.fromkeys(OWN, _AT_THE_SERVER),
    **_NO_LORA,
    "engine.num_blocks": _AT_THE_SERVER,
    "engine.max_num_batched_tokens": _AT_THE_SERVER,
}
"""Rows of servers behind a URL."""

ENGINE_TABLES: Mapping[str, Mapping[str, Row]] = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "trtllm": TRTLLM,
    "llamacpp": LLAMACPP,
    "native": NATIVE,
    "mock": MOCK,
    "echo": OWN,
    "openai": OPENAI,
}


def engine_arguments(settings: Settings) -> dict[str, Any]:
    """Return the arguments of the settings' engine by its own names, without the model.

    A name with a dot becomes a mapping inside the result. Raises `ConfigError` for what the engine
    lacks and for an argument that its installed version does not know.
    """
    kind = package_kind(settings.engine.kind)
    arguments: dict[str, Any] = {}
    for argument in explain_arguments(settings):
        if argument.name:
            _put(arguments, argument.name, argument.value)
    if settings.engine.args and kind not in ENGINE_PACKAGES and kind in ENGINE_TABLES:
        raise ConfigError(
            f"engine {kind} has no arguments of its own (--engine-arg)",
            hint="use the settings of section engine",
            param=ENGINE_ARGS_KEY,
        )
    for name, value in settings.engine.args.items():
        first = name.partition(".")[0]
        if first in OWNED_ARGUMENTS.get(kind, ()):
            raise ConfigError(
                f"argument {first} of engine {kind} is set by dynamo (--engine-arg)",
                hint=f"remove it: dynamo follows and moves the KV blocks of {kind} by it",
                param=ENGINE_ARGS_KEY,
            )
        check_argument_name(kind, first)
        _put(arguments, name, value)
    _check_structures(kind, arguments)
    return arguments


def engine_environment(settings: Settings) -> dict[str, str]:
    """Return the variables that an engine reads before its start: the devices that it may use."""
    devices = settings.engine.device_ids
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if devices else {}


def explain_arguments(settings: Settings) -> Iterator[EngineArgument]:
    """Yield what becomes of each setting that is not at its default and that the engine's table
    names. Raises `ConfigError` for what the engine lacks."""
    kind = package_kind(settings.engine.kind)
    for key, row in ENGINE_TABLES.get(kind, {}).items():
        value = attrgetter(key)(settings)
        if value == setting_specs_by_key()[key].default:
            continue
        if isinstance(row, IgnoredSetting):
            yield EngineArgument(key, note=f"no effect with engine {kind}: {row.reason}")
        elif isinstance(row, RefusedSetting):
            raise _lacks(kind, key, value, row.hint)
        elif value in row.refused:
            raise _lacks(kind, key, value, row.refused[value])
        else:
            passed = row.convert(settings, value) if row.convert else row.values.get(value, value)
            yield EngineArgument(key, row.name, passed, f"{kind}: {row.name}")


def _lacks(kind: str, key: str, value: Any, hint: str) -> ConfigError:
    return ConfigError(f"engine {kind} does not have {key} = {value}", hint=hint, param=key)


def _put(arguments: dict[str, Any], name: str, value: Any) -> None:
    """Set an argument by its dotted name. A mapping is merged into what is there, and copied."""
    *path, last = name.split(".")
    for part in path:
        arguments = arguments.setdefault(part, {})
        if not isinstance(arguments, dict):
            raise ConfigError(
                f"argument {part} is {arguments!r}, so that {name} cannot be set (--engine-arg)",
                hint=f"drop one of the two, or give {part} as a mapping",
                param=ENGINE_ARGS_KEY,
            )
    arguments[last] = _merge(arguments.get(last), value)


def _merge(old: Any, value: Any) -> Any:
    """Return `value`; if it is a mapping, a new one with the entries of both."""
    if not isinstance(value, Mapping):
        return value
    merged = dict(old) if isinstance(old, Mapping) else {}
    return merged | {key: _merge(merged.get(key), item) for key, item in value.items()}


def _check_structures(kind: str, arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if an argument that the table leads into is not a mapping."""
    for row in ENGINE_TABLES.get(kind, {}).values():
        name, dot, _ = row.name.partition(".") if isinstance(row, PassedSetting) else ("", "", "")
        if dot and not isinstance(arguments.get(name, {}), Mapping):
            raise ConfigError(
                f"argument {name} is {arguments[name]!r}, not a mapping (--engine-arg)",
                hint=f"pass its fields: --engine-arg {name}.NAME=VALUE",
                param=ENGINE_ARGS_KEY,
            )


def needs_connector(settings: Settings) -> bool:
    """Whether workers with these settings move KV to each other by a connector of their engine."""
    if package_kind(settings.engine.kind) not in ENGINES_WITH_CONNECTORS:
        return False
    return settings.engine.role != "both" or settings.router.disaggregation.mode == "flexible"


def check_roles(settings: Settings) -> None:
    """Raise `ConfigError` if workers cannot have the role of the settings, or not both roles for
    each other (`--flexible-workers`)."""
    role = settings.engine.role
    flexible = role == "both" and needs_connector(settings)
    check_role(settings.engine.kind, "flexible" if flexible else role)


def check_role(kind: str, role: str) -> None:
    """Raise `ConfigError` for a role that the workers of an engine cannot have."""
    kind = package_kind(kind)
    if role == "both" or kind not in ENGINE_TABLES or kind in ENGINES_WITH_ROLES:
        return
    if kind not in ENGINES_WITH_CONNECTORS:
        known = ", ".join((*ENGINES_WITH_ROLES, *ENGINES_WITH_CONNECTORS))
        raise ConfigError(
            f"engine {kind} cannot have the role {role}: its workers do not exchange KV blocks",
            hint=f"roles work with {known}; leave engine.role at both",
            param="engine.role",
        )
    if find_spec("nixl") is None:
        raise MissingPackage(
            f"engine {kind} needs NIXL for the role {role}, and the package nixl is not installed",
            hint="pip install nixl",
            param="engine.role",
        )
