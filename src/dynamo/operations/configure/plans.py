"""The question, the layouts of a model on GPUs, and the plans that answer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.operations.configure.catalogue import EngineFacts, Gpu
from dynamo.operations.configure.shapes import ModelShape
from dynamo.operations.configure.step_time import RESERVED_BYTES

Goal = Literal["throughput", "latency", "cost"]
DEGREES = (1, 2, 4, 8, 16)
STAGES = (1, 2, 4)
WEIGHT_SHARE = 0.9
"""Share of a GPU's memory that weights and buffers may take."""
MOST_GPUS = 65_536


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A question: a model, GPUs, a load and a promise. Without `gpus` the fewest for `rate`
    requests a second are sought. Infinity: no limit."""

    shape: ModelShape
    gpu: Gpu
    engines: tuple[EngineFacts, ...]
    isl: int
    osl: int
    prefix: int = 0
    gpus: int = 0
    rate: float = 0.0
    ttft_ms: float = math.inf
    tpot_ms: float = math.inf
    goal: Goal = "throughput"
    kv_precision: str = ""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How one worker divides the model among its GPUs."""

    engine: str
    tensor: int
    stages: int = 1
    attention_dp: bool = False
    split_experts: bool = False
    kv_precision: str

    @property
    def gpus(self) -> int:
        """GPUs of one worker."""
        return self.tensor * self.stages

    @property
    def name(self) -> str:
        """The layout in short, such as tp4 or tp2 pp2 fp8-kv."""
        parts = [f"{'dp' if self.attention_dp else 'tp'}{self.tensor}"]
        parts += [f"pp{self.stages}"] if self.stages > 1 else []
        parts += ["ep"] if self.split_experts else []
        return " ".join([*parts, f"{self.kv_precision}-kv"])


class Workers(msgspec.Struct, frozen=True):
    """Workers of a deployment: `count` that answer, with `seqs` requests at once each, and the
    prefill workers ahead of them. Without a `count` there are as many as a question wants."""

    layout: Layout
    count: int
    seqs: int
    prefill_layout: Layout | None = None
    prefill_count: int = 0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment and what it would reach. `concurrency` is of one worker that computes answers;
    `replicas` counts those, `prefill_workers` the others. Bars are (low, high)."""

    kind: Literal["aggregated", "disaggregated"]
    layout: Layout
    replicas: int
    concurrency: int
    prefill_layout: Layout | None = None
    prefill_workers: int = 0
    ttft_ms: float
    tpot_ms: float
    ttft_bar: tuple[float, float]
    tpot_bar: tuple[float, float]
    rate: float
    tokens_per_gpu: float
    weight_gb: float
    kv_gb: float
    memory_gb: float
    capacity: float
    extrapolated: bool
    binds: str = ""

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        ahead = self.prefill_layout.gpus * self.prefill_workers if self.prefill_layout else 0
        return self.layout.gpus * self.replicas + ahead

    @property
    def tokens_per_user(self) -> float:
        """Tokens a second that one reader sees."""
        return 1e3 / self.tpot_ms

    def misses(self, question: Question) -> float:
        """Return by which factor the worst limit is missed; at most 1 keeps the promise."""
        return max(self.ttft_ms / question.ttft_ms, self.tpot_ms / question.tpot_ms)


def find_layouts(question: Question) -> Sequence[Layout]:
    """Return the layouts whose weights fit. Raises `ConfigError` if there is none."""
    shape, gpu = question.shape, question.gpu
    budget = question.gpus or MOST_GPUS
    layouts = [
        layout
        for engine in question.engines
        for layout in _layouts_of(question, engine)
        if layout.gpus <= budget
    ]
    if not any(shape.heads % degree == 0 for degree in DEGREES):
        raise ConfigError(f"no tensor parallelism of {DEGREES} divides {shape.heads} heads")
    fits = [layout for layout in layouts if _fits(question, layout)]
    if not fits:
        size = shape.weight_bytes() / 1e9
        least = math.ceil(size / (gpu.memory * WEIGHT_SHARE))
        raise ConfigError(
            f"{shape.name} has {size:.0f} GB of {shape.precision} weights, which fit no layout of "
            f"{f'{question.gpus} ' if question.gpus else ''}{gpu.name} ({gpu.memory:g} GB each)",
            hint=f"it needs {least} or more of them{_shorter(shape)}",
        )
    return fits


def _shorter(shape: ModelShape) -> str:
    """Return the advice to shorten weights, where a usual format is shorter."""
    shorter = {"bf16": "fp8", "fp16": "fp8", "fp8": "fp4", "int8": "int4"}.get(shape.precision)
    return f"; or shorter weights (--precision {shorter})" if shorter else ""


def check_layout(question: Question, layout: Layout) -> None:
    """Raise `ConfigError` unless the model can be divided like that, and its weights fit."""
    shape, gpu = question.shape, question.gpu
    if shape.heads % layout.tensor and not layout.attention_dp:
        raise ConfigError(
            f"tensor parallelism of {layout.tensor} does not divide the {shape.heads} heads of "
            f"{shape.name}",
            hint="use a degree that does, such as 1, 2, 4 or 8",
        )
    if not _fits(question, layout):
        raise ConfigError(
            f"{shape.weight_bytes() / layout.gpus / 1e9:.0f} GB of weights do not fit each "
            f"{gpu.name} ({gpu.memory:g} GB) with {layout.name}",
            hint=f"divide the model by more GPUs{_shorter(shape)}",
        )


def _layouts_of(question: Question, engine: EngineFacts) -> Iterator[Layout]:
    shape = question.shape
    short = shape.precision in {"fp8", "fp4", "int4", "int8"}
    own = question.kv_precision or ("fp8" if short and question.gpu.fp8 else "bf16")
    for tensor in DEGREES:
        if shape.heads % tensor or tensor > question.gpu.gpus * 2:
            continue
        for stages in STAGES if engine.pipeline else (1,):
            if stages > shape.layers or tensor * stages > DEGREES[-1]:
                continue
            yield Layout(engine=engine.name, tensor=tensor, stages=stages, kv_precision=own)
            if not question.kv_precision and own == "bf16" and question.gpu.fp8 and stages == 1:
                yield Layout(engine=engine.name, tensor=tensor, kv_precision="fp8")
        if shape.experts and tensor > 1 and shape.experts % tensor == 0:
            for data in (False, True):
                yield Layout(
                    engine=engine.name,
                    tensor=tensor,
                    attention_dp=data,
                    split_experts=True,
                    kv_precision=own,
                )


def _fits(question: Question, layout: Layout) -> bool:
    each = question.shape.weight_bytes() / layout.gpus
    return each + RESERVED_BYTES < question.gpu.memory * 1e9 * WEIGHT_SHARE


def alike(layouts: Sequence[Layout]) -> Iterator[Sequence[Layout]]:
    """Yield the layouts of one stage whose prefill and decode workers one configuration can name:
    those that differ in nothing but plain tensor parallelism."""
    groups: dict[tuple[object, ...], list[Layout]] = {}
    for layout in layouts:
        if layout.stages == 1:
            degree = layout.tensor if layout.attention_dp else 0
            key = (layout.kv_precision, layout.split_experts, degree)
            groups.setdefault(key, []).append(layout)
    yield from groups.values()
