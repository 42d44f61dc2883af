"""The device and number format of the native engine, chosen before anything is loaded."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from dynamo.core.errors import ConfigError
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.inference.engines.packages import has_nvidia_driver

TORCH_COMMAND = "pip install 'dynamo-python[torch]'"
ElementType = Literal["float32", "float16", "bfloat16"]


class TorchDevice(NamedTuple):
    """A device by torch's name, and the format of weights, activations and KV blocks."""

    name: str
    dtype: ElementType


def choose_device(settings: EngineSettings) -> TorchDevice | None:
    """Return where the native engine computes; None: on the CPU by NumPy. With `auto` that is a
    card that torch can use. Raises `ConfigError` for a device or format that this machine lacks."""
    if settings.device == "auto" and not wants_card(settings):
        if settings.dtype not in {"auto", "float32"}:
            raise _error(
                f"engine.dtype is {settings.dtype}, and NumPy computes in float32",
                "use --device cpu, which computes by PyTorch, or leave engine.dtype out",
                "dtype",
            )
        return None
    if find_spec("torch") is None:
        raise _error(
            f"engine.device is {settings.device}, and PyTorch is not installed",
            f"{TORCH_COMMAND}, or leave engine.device at auto, which then computes by NumPy",
        )
    import torch

    if settings.device == "cpu":
        return TorchDevice("cpu", _choose_dtype(settings, "float32"))
    if reason := _card_problem(torch):
        if settings.device == "auto" and settings.dtype in {"auto", "float32"}:
            return None
        raise _error(
            f"engine.device is {settings.device}, and PyTorch {torch.__version__} uses no card "
            f"here: {reason}",
            "install a driver and a build of PyTorch that suit each other, or use --device cpu",
        )
    has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = _choose_dtype(settings, "bfloat16" if has_bfloat16 else "float16")
    if dtype == "bfloat16" and not has_bfloat16:
        raise _error(
            f"engine.dtype is bfloat16, which {torch.cuda.get_device_name()} lacks",
            "use --dtype float16",
            "dtype",
        )
    return TorchDevice("cuda", dtype)


def wants_card(settings: EngineSettings) -> bool:
    """Whether the native engine is likely to compute on a card. PyTorch is not loaded."""
    if settings.device == "auto":
        return has_nvidia_driver() and find_spec("torch") is not None
    return settings.device == "cuda"


def _choose_dtype(settings: EngineSettings, default: ElementType) -> ElementType:
    formats: dict[str, ElementType] = {
        "float32": "float32", "float16": "float16", "bfloat16": "bfloat16",
    }  # fmt: skip
    return formats.get(settings.dtype, default)


def _card_problem(torch: Any) -> str:
    """Return why torch cannot compute on a card, or ""."""
    if torch.version.cuda is None:
        return "this build has no CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return "" if torch.cuda.device_count() else "no card is visible"


def _error(message: str, hint: str, name: str = "device") -> ConfigError:
    return ConfigError(message, hint=hint, param=f"engine.{name}")
