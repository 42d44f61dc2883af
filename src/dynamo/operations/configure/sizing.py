"""Rules of thumb for one model on one kind of GPU."""

from __future__ import annotations

import math

import msgspec

from dynamo.core.errors import ConfigError

NEEDED_SHARE = 1.5
"""Memory that a model needs over its weights' size, for KV and buffers."""
USABLE_SHARE = 0.9
REFERENCE_GB = 24.0
REFERENCE_BATCH = 32
FEWEST, MOST = 8, 128
LONG_TOKENS, MEDIUM_TOKENS = 2048, 1024
LONG_FACTOR, MEDIUM_FACTOR = 0.5, 0.7


class BatchLimits(msgspec.Struct, frozen=True):
    """Sizes of an engine's steps, by the engine's own names."""

    batch_size: int
    max_num_batched_tokens: int
    max_num_seqs: int


def calculate_optimal_tp(
    model_size_gb: float, gpu_memory_gb: float, num_gpus: int, *, per_gpu: bool = False
) -> int:
    """Return over how many GPUs to divide a model. 90 % of their memory holds one and a half times
    its size, and there are at least two if there can be.

    With `per_gpu` the need is first divided by `num_gpus`, and only what is above one GPU's memory
    counts: never more than `num_gpus`, even where the model does not fit. Raises `ConfigError`.
    """
    for name, value in (("model_size_gb", model_size_gb), ("gpu_memory_gb", gpu_memory_gb)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value}, expected a size above 0")
    if num_gpus < 1:
        raise ConfigError(f"num_gpus is {num_gpus}, expected 1 or more")
    usable = USABLE_SHARE * gpu_memory_gb
    if per_gpu:
        need = NEEDED_SHARE * model_size_gb / num_gpus
        return min(math.ceil(need / usable), num_gpus) if need > usable else min(2, num_gpus)
    needed = math.ceil(NEEDED_SHARE * model_size_gb / usable)
    if needed > num_gpus:
        raise ConfigError(
            f"a model of {model_size_gb:g} GB needs {needed} GPUs of {gpu_memory_gb:g} GB, not "
            f"{num_gpus}",
            hint="more GPUs, larger ones, or shorter weights",
        )
    return max(needed, min(2, num_gpus))


def optimize_batch_size(gpu_memory_gb: float, sequence_length: int) -> BatchLimits:
    """Return the batch for sequences of `sequence_length` tokens: 32 on 24 GB, in proportion to the
    memory, fewer for long sequences, from 8 to 128. Raises `ConfigError`."""
    if not 0 < gpu_memory_gb < math.inf or sequence_length < 1:
        raise ConfigError(
            f"no batch for {gpu_memory_gb} GB and sequences of {sequence_length} tokens",
            hint="both must be above 0",
        )
    factor = 1.0
    if sequence_length > LONG_TOKENS:
        factor = LONG_FACTOR
    elif sequence_length > MEDIUM_TOKENS:
        factor = MEDIUM_FACTOR
    batch = int(REFERENCE_BATCH * gpu_memory_gb / REFERENCE_GB * factor)
    batch = min(max(batch, FEWEST), MOST)
    return BatchLimits(batch, batch * sequence_length, 2 * batch)
