"""Whether several devices can share a model, checked before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo.core.errors import ConfigError
from dynamo.inference.torch.device import TorchDevice

if TYPE_CHECKING:
    from dynamo.core.settings.schema_cache import CacheSettings
    from dynamo.core.settings.schema_engine import EngineSettings
    from dynamo.models.checkpoint.decoder_config import DecoderConfig


def check_ranks(
    config: DecoderConfig,
    settings: EngineSettings,
    cache: CacheSettings,
    device: TorchDevice | None,
) -> None:
    """Raise `ConfigError` if so many devices cannot share the model, or are not there."""
    size = settings.tensor_parallel_size
    if device is None:
        raise _error(size, "NumPy computes on the CPU, in one process", "use --device cpu or cuda")
    counts = {
        "query heads": config.num_heads,
        "KV heads": config.num_kv_heads,
        "columns of the MLP": config.intermediate_size,
    }
    if odd := [f"{count} {name}" for name, count in counts.items() if count % size]:
        sizes = [n for n in range(1, size) if not any(count % n for count in counts.values())]
        raise _error(
            size, f"it does not divide the model's {' and '.join(odd)}", f"use {sizes[-1]}"
        )
    if device.name != "cpu":
        import torch

        if (cards := torch.cuda.device_count()) < size:
            visible = "1 card is" if cards == 1 else f"{cards} cards are"
            raise _error(size, f"{visible} visible", f"use {cards}, or name more in --device-ids")
    reasons = {
        "norms over all heads (OLMo-2) are not divided": config.qk_norm == "all",
        "data-parallel ranks share one process": settings.data_parallel_size > 1,
        "workers of several devices exchange no KV blocks": settings.role != "both",
        f"no tier ({', '.join(cache.tiers)}) takes the blocks of several devices": cache.tiers,
    }
    for reason, applies in reasons.items():
        if applies:
            raise _error(size, reason, "use 1, or serve by --engine.kind vllm")


def _error(size: int, reason: str, hint: str) -> ConfigError:
    param = "engine.tensor_parallel_size"
    return ConfigError(f"{param} is {size}, and {reason}", hint=hint, param=param)
