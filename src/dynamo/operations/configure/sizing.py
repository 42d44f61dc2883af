"""Rules of thumb for one model on one kind of GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dynamo.core.errors import ConfigError

NEEDED_SHARE = 1.5
"""Memory that a model needs over its weights' size, for KV and buffers."""
USABLE_SHARE = 0.9
REFERENCE_GB = 24.0
REFERENCE_BATCH = 32
FEWEST, MOST = 8, 128
LONG_TOKENS, MEDIUM_TOKENS = 2048, 1024
LONG_FACTOR, MEDIUM_FACTOR = 0.5, 0.7


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


def optimize_batch_size(
    model_config: Mapping[str, Any], hardware_config: Mapping[str, Any]
) -> dict[str, int]:
    """Return the sizes of an engine's batch: 32 sequences on 24 GB, in proportion to the
    `gpu_memory_gb`, fewer if `avg_sequence_length` is above 1,024 or 2,048, and from 8 to 128.
    Raises `ConfigError`."""
    memory: Any = hardware_config.get("gpu_memory_gb")
    length: Any = model_config.get("avg_sequence_length", MEDIUM_TOKENS)
    for name, value in (("gpu_memory_gb", memory), ("avg_sequence_length", length)):
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value!r}, expected a number above 0")
    factor = 1.0
    if length > LONG_TOKENS:
        factor = LONG_FACTOR
    elif length > MEDIUM_TOKENS:
        factor = MEDIUM_FACTOR
    batch = int(int(REFERENCE_BATCH * (memory / REFERENCE_GB)) * factor)
    batch = min(max(batch, FEWEST), MOST)
    return {
        "max_batch_size": batch,
        "max_num_batched_tokens": int(batch * length),
        "max_num_seqs": 2 * batch,
    }
