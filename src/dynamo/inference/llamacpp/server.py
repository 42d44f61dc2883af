"""Opens llama.cpp's server from the library xllamacpp, and plans its sizes."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo.core.errors import ConfigError, ModelUnavailable, nearest_name_hint
from dynamo.inference.engines.arguments import LLAMACPP_SLOTS
from dynamo.inference.native.engine_sizing import usable_cores
from dynamo.models.checkpoint.gguf import GgufFile

if TYPE_CHECKING:
    from dynamo.inference.engine_registry import EngineInputs

log = logging.getLogger(__name__)

DEFAULT_BATCH_TOKENS = 512
KV_MEMORY_SHARE = 0.4
"""Share for the slots' KV of the memory that the weights leave."""
KV_VALUE_BYTES = 2
MAX_THREADS = 16
"""More threads than this wait for memory. A core is left to the other processes, since the threads
spin until the last of them has a core: with two on two busy cores 50 times as long."""
MIN_CONTEXT_TOKENS = 256
CONTEXT_STEP = 256
"""llama.cpp rounds the context of a slot up to this."""
SAMPLING_FIELDS = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "presence_penalty": "penalty_present",
    "frequency_penalty": "penalty_freq",
    "repetition_penalty": "penalty_repeat",
}
"""llama.cpp's names of sampling, by those of `SamplingParams`."""
SIZE_FLAGS = {"n_parallel": "--max-num-seqs", "n_ctx": "--max-model-len"}
"""Arguments of llama.cpp that are flags of ours."""
REASON_MARK = " E "
"""In llama.cpp's log this stands before an error."""
LOG_DELAY_S = 0.5
"""A thread of llama.cpp writes its log, so that the reason of a failure comes later than it."""


class ServerSizes(msgspec.Struct, frozen=True):
    """Sizes of a server. `context_tokens` are those of each of the `slots`. `arguments` are further
    attributes of `CommonParams`, which come last."""

    slots: int
    context_tokens: int
    batch_tokens: int = DEFAULT_BATCH_TOKENS
    threads: int = 1
    arguments: dict[str, Any] = {}


def plan_sizes(inputs: EngineInputs) -> ServerSizes:
    """Return the sizes that the settings and the memory give. Raises `ConfigError` where a slot
    would hold too few tokens, `ModelUnavailable` for a model that is no GGUF file."""
    settings, path = inputs.settings.engine, inputs.files.path
    if not path.is_file():
        raise ModelUnavailable(
            f"llama.cpp reads GGUF files, and {path} is a folder",
            hint="name a .gguf file, or serve the folder with out=native or out=vllm",
        )
    slots = settings.max_num_seqs or LLAMACPP_SLOTS
    context = inputs.card.context_tokens
    if inputs.memory_bytes:
        spare_bytes = max(0, inputs.memory_bytes - path.stat().st_size) * KV_MEMORY_SHARE
        context = min(context, int(spare_bytes / _kv_token_bytes(path) / slots))
    context -= context % CONTEXT_STEP
    if context < MIN_CONTEXT_TOKENS:
        raise ConfigError(
            f"each of {slots} slots would have {context} tokens; llama.cpp needs "
            f"{MIN_CONTEXT_TOKENS}",
            hint="lower --max-num-seqs, raise --max-model-len, or free memory",
        )
    cores = max(1, usable_cores() // max(1, inputs.settings.worker_count) - 1)
    sizes = ServerSizes(
        slots,
        context,
        settings.max_num_batched_tokens or DEFAULT_BATCH_TOKENS,
        settings.threads or min(cores, MAX_THREADS),
        settings.args,
    )
    fields = msgspec.to_builtins(sizes)
    del fields["arguments"]  # arguments may hold keys
    log.info("llama.cpp is planned", extra={"fields": fields})
    return sizes


def _kv_token_bytes(path: Path) -> int:
    """Return the bytes of KV of one token in all layers."""
    with GgufFile(path) as file:
        prefix = file.get("general.architecture", "")
        layers: int = file.get(f"{prefix}.block_count", 1)
        heads = _of_layers(file.get(f"{prefix}.attention.head_count", 1), layers)
        kv_heads = _of_layers(file.get(f"{prefix}.attention.head_count_kv", heads), layers)
        width = file.get(f"{prefix}.embedding_length", 1) // max(1, *heads)
        keys = file.get(f"{prefix}.attention.key_length", width)
        values = file.get(f"{prefix}.attention.value_length", width)
    return max(1, int(sum(kv_heads) * (keys + values) * KV_VALUE_BYTES))


def _of_layers(count: int | list[int], layers: int) -> list[int]:
    """Return a number of heads for each layer. A file has one for all, or a list."""
    return count if isinstance(count, list) else [count] * layers


def open_server(path: Path, sizes: ServerSizes) -> Any:
    """Load the model and return a `xllamacpp.Server`. Blocks. Raises `ModelUnavailable` with the
    reason that llama.cpp writes to stderr.

    The server always listens on loopback. Its key is random and kept nowhere.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = sizes.slots * sizes.context_tokens
    params.n_parallel = sizes.slots
    params.n_batch = params.n_ubatch = sizes.batch_tokens
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = sizes.threads
    params.fit_params = False
    params.cache_ram_mib = 0  # the engine chooses the slots, which bypasses that cache
    params.cache_idle_slots = False
    params.verbosity = 1
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [secrets.token_urlsafe(32)]
    params.cors_origins = ""
    params.ui = params.endpoint_slots = False
    params.n_threads_http = 1
    for name, value in sizes.arguments.items():
        _set_argument(params, name, value)
    with captured_stderr() as written:
        try:
            server = xllamacpp.Server(params)
        except RuntimeError as error:
            failure = error
            time.sleep(LOG_DELAY_S)
        else:
            # A server that ends before its loop runs waits for ever, with the interpreter's lock.
            server.handle_completions({"prompt": [0], "max_tokens": 1}, lambda _: False)
            return server
    lines = [line for line in written if REASON_MARK in line]
    reason = lines[0].partition(REASON_MARK)[2] if lines else str(failure)
    raise ModelUnavailable(f"llama.cpp cannot load {path}: {reason}") from failure


def default_sampling(
    generation: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, float]:
    """Return the sampling of requests that name none: what the `arguments` of the engine say, else
    the model's `generation` defaults, else llama.cpp's own."""
    import xllamacpp

    own = xllamacpp.CommonParams().sampling
    values = {}
    for name, field in SAMPLING_FIELDS.items():
        value = arguments.get(f"sampling.{field}", generation.get(name))
        values[name] = round(float(getattr(own, field) if value is None else value), 6)
    return values


def _set_argument(params: Any, name: str, value: Any) -> None:
    """Set an attribute; dots lead into structures. Raises `ConfigError` for an unknown one, for
    a wrong value, and for one that the settings decide."""
    if flag := SIZE_FLAGS.get(name):
        text = f"--engine-arg {name} would contradict the sizes that the router knows"
        raise ConfigError(text, hint=f"use {flag}")
    *path, last = name.split(".")
    target = params
    for part in path:
        target = getattr(target, part, None)
    if not hasattr(target, last):
        names = [known for known in dir(params) if not known.startswith("_")]
        hint = nearest_name_hint(path[0] if path else last, names, "see CommonParams of xllamacpp")
        raise ConfigError(f"llama.cpp has no argument {name!r} (--engine-arg)", hint=hint)
    kind = type(getattr(target, last))
    if kind is bool and not isinstance(value, bool):
        raise ConfigError(f"--engine-arg {name} is true or false, not {value!r}")
    try:
        setattr(target, last, kind(value))
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise ConfigError(f"--engine-arg {name}: {error}") from None


@contextmanager
def captured_stderr() -> Iterator[list[str]]:
    """Collect the lines that anything in this process writes to descriptor 2 in the meantime, and
    write them to stderr afterwards."""
    lines: list[str] = []
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 2)
            try:
                yield lines
            finally:
                sys.stderr.flush()
                os.dup2(saved, 2)
                file.seek(0)
                content = file.read()
                lines += content.decode("utf-8", "replace").splitlines()
                os.write(2, content)
    finally:
        os.close(saved)
