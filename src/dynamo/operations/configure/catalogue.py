"""Facts of GPUs, engines and models: the files of `data`, and models in folders."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from dynamo.core.errors import ConfigError, nearest_name_hint
from dynamo.operations.configure.shapes import ModelShape, read_shape
from dynamo.operations.configure.yaml_files import read_yaml

DATA = Path(__file__).with_name("data")
ALIASES = {
    "deepseek-ai/DeepSeek-V3": "deepseek-ai/DeepSeek-R1",
    "deepseek-ai/DeepSeek-V3.1": "deepseek-ai/DeepSeek-R1",
    "meta-llama/Meta-Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
    "meta-llama/Meta-Llama-3.1-70B": "meta-llama/Llama-3.1-70B",
    "meta-llama/Llama-3.3-70B": "meta-llama/Llama-3.1-70B",
    "zhipuai/GLM-5": "zai-org/GLM-5",
}
"""Names of models with the shape of another one."""
TUNED_ENDINGS = ("-NVFP4", "-FP8", "-Instruct")
MAX_CONFIG_BYTES = 4_000_000


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A kind of GPU; see `data/gpus.yaml` for the units. Without `fp8` or `fp4` the arithmetic is
    that of the next wider precision."""

    name: str
    memory: float
    bandwidth: float
    link: float
    bf16: float
    fp8: float = 0.0
    fp4: float = 0.0
    gpus: int
    domain: str
    hourly: float


class EngineFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How an engine is started; see `data/engines.yaml`."""

    name: str
    kind: str
    image: str
    module: str
    pipeline: bool
    roles: bool
    flags: Mapping[str, str]


@cache
def gpus() -> Mapping[str, Gpu]:
    """Return the known GPUs by name."""
    return {
        name: msgspec.convert({"name": name, **facts}, Gpu)
        for name, facts in read_yaml(DATA / "gpus.yaml").items()
    }


@cache
def engines() -> Mapping[str, EngineFacts]:
    """Return the known engines by name."""
    return {
        name: msgspec.convert({"name": name, **facts}, EngineFacts)
        for name, facts in read_yaml(DATA / "engines.yaml").items()
    }


@cache
def models() -> Mapping[str, ModelShape]:
    """Return the shapes of the known models by name."""
    return {
        name: read_shape(config, name) for name, config in read_yaml(DATA / "models.yaml").items()
    }


def find_gpu(name: str) -> Gpu:
    """Return a GPU. Raises `ConfigError` with the nearest name."""
    gpu = gpus().get(name.lower().replace("-", "_"))
    if gpu is None:
        raise ConfigError(f"unknown GPU {name!r}", hint=nearest_name_hint(name, gpus(), cutoff=0.4))
    return gpu


def find_engine(name: str) -> EngineFacts:
    """Return an engine. Raises `ConfigError` with the nearest name."""
    if name not in engines():
        hint = nearest_name_hint(name, engines(), cutoff=0.4)
        raise ConfigError(f"unknown engine {name!r}", hint=hint)
    return engines()[name]


def find_model(name: str) -> ModelShape:
    """Return the shape of a model: a folder with a config.json, that file, or a known name. Raises
    `ConfigError`."""
    path = Path(name).expanduser()
    if path.is_dir() or path.suffix == ".json":
        return _read_config(path / "config.json" if path.is_dir() else path, name)
    known = known_name(name)
    if known not in models():
        raise ConfigError(
            f"unknown model {name!r}",
            hint=nearest_name_hint(
                name,
                models(),
                "give the folder of its config.json, or one of: " + ", ".join(models()),
                cutoff=0.5,
            ),
        )
    precision = "fp4" if "FP4" in name.upper() else "fp8" if "FP8" in name.upper() else ""
    shape = models()[known]
    return shape.with_precision(precision) if precision else shape


def known_name(name: str) -> str:
    """Return the name of a known model of the same shape; `name` itself if there is none."""
    by_end = {known.split("/")[-1].lower(): known for known in [*models(), *ALIASES]}
    base = name
    while base:
        for candidate in (base, by_end.get(base.split("/")[-1].lower(), "")):
            if (same := ALIASES.get(candidate, candidate)) in models():
                return same
        ending = next((end for end in TUNED_ENDINGS if base.upper().endswith(end.upper())), "")
        if not ending:
            return name
        base = base[: -len(ending)]
    return name


def family_of(shape: ModelShape) -> str:
    """Return the known model of a shape's layers and size, whose measured rows count for it."""
    for name, known in models().items():
        if (known.layers, known.hidden, known.kv_values) == (
            shape.layers,
            shape.hidden,
            shape.kv_values,
        ) and abs(known.weights - shape.weights) < 0.02 * known.weights:
            return name
    return shape.name


def _read_config(path: Path, name: str) -> ModelShape:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} is too large for a config.json")
        config = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}",
            hint="MODEL is a folder with a config.json, such a file, or a known name",
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object")
    folder = path.parent.resolve().name if path.name == "config.json" else path.stem
    return read_shape(config, folder or name)
