"""Cases to predict: one replica of a model under a closed loop of requests, and arrays of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from dynamo.operations.configure.catalogue import Gpu
from dynamo.operations.configure.shapes import KV_BYTES, WEIGHT_BYTES, ModelShape

Floats = NDArray[np.float64]
ENGINE_ORDER = ("trtllm", "sglang", "vllm")
DOMAINS = ("hopper", "blackwell", "grace")
ARITHMETIC = {"bf16": 0, "fp16": 0, "fp8": 1, "int8": 1, "fp4": 2, "int4": 3}
STATE_BYTES = 4
SHORT_PRECISIONS = frozenset({"fp8", "fp4", "int8", "int4"})


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A replica and its load. `gpus` share each of `stages` of layers. With `attention_dp` every
    GPU keeps the KV of its own sequences. Of `isl` prompt tokens `prefix` are cached. A row that
    was measured over the first wave of requests only is `first_wave`. `version` of the engine,
    `day` and kind of the measurement tell rows of one campaign; a question has those of the newest
    one (`campaign_wave`)."""

    shape: ModelShape
    family: str
    gpu: Gpu
    engine: str
    gpus: int
    stages: int = 1
    attention_dp: bool = False
    split_experts: bool = False
    isl: float
    osl: float
    prefix: float = 0.0
    concurrency: float
    first_wave: bool = False
    version: str = "unknown"
    day: str = "unknown"
    campaign_wave: bool = False
    kv_precision: str = ""

    @property
    def kv_format(self) -> str:
        """Precision of the KV cache: 8 bits beside short weights, unless it is given."""
        short = self.shape.precision in SHORT_PRECISIONS
        return self.kv_precision or ("fp8" if short else "bf16")


class CaseArrays:
    """Arrays of what the formulas read of many cases. Sizes are in bytes, rates per ms."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.count = len(cases)
        self._cases = cases
        self.engine = self._indices(lambda case: ENGINE_ORDER.index(case.engine))
        self.domain = self._indices(lambda case: DOMAINS.index(case.gpu.domain))
        self.precision = self._indices(lambda case: ARITHMETIC[case.shape.precision])
        self.isl, self.osl, self.prefix, self.concurrency = (
            self._floats(read)
            for read in (
                lambda case: case.isl,
                lambda case: case.osl,
                lambda case: case.prefix,
                lambda case: case.concurrency,
            )
        )
        self.gpus = self._floats(lambda case: case.gpus)
        self.stages = self._floats(lambda case: case.stages)
        self.attention_dp = self._floats(lambda case: case.attention_dp) > 0
        self.split_experts = self._floats(lambda case: case.split_experts)
        self.first_wave = self._floats(lambda case: case.first_wave) > 0
        self._read_shapes()
        self._read_gpus()

    def _read_shapes(self) -> None:
        shape = self._shape
        self.layers, self.hidden, self.moe_layers = (
            shape(lambda s: s.layers),
            shape(lambda s: s.hidden),
            shape(lambda s: s.moe_layers),
        )
        self.dense_weights = shape(lambda s: s.dense_weights)
        self.routed_weights = shape(lambda s: s.routed_weights)
        self.dense_bytes = shape(lambda s: s.dense_weights * WEIGHT_BYTES[s.dense_precision])
        self.routed_bytes = shape(lambda s: s.routed_bytes())
        self.weight_bytes = shape(lambda s: s.weight_bytes())
        self.chosen_share = shape(lambda s: s.experts_per_token / max(1, s.experts))
        self.chosen = shape(lambda s: s.experts_per_token)
        self.latent = shape(lambda s: s.latent) > 0
        self.kv_heads = shape(lambda s: s.kv_heads)
        self.attention_size = shape(lambda s: s.heads * s.head_dim)
        self.full_layers = shape(lambda s: s.full_layers)
        self.sliding_layers = shape(lambda s: s.sliding_layers)
        self.window = shape(lambda s: s.window)
        self.state_bytes = shape(lambda s: s.state_values * STATE_BYTES)
        self.kv_layer_bytes = self._floats(
            lambda case: case.shape.kv_values * KV_BYTES[case.kv_format]
        )
        shared = np.where(self.latent, 1.0, np.minimum(self.gpus, self.kv_heads))
        self.kv_shards = np.where(self.attention_dp, self.gpus, shared)

    def _read_gpus(self) -> None:
        def gpu(read: Callable[[Gpu], float]) -> Floats:
            return self._floats(lambda case: read(case.gpu))

        self.memory = gpu(lambda g: g.memory * 1e9)
        self.bandwidth = gpu(lambda g: g.bandwidth * 1e6)
        self.link = gpu(lambda g: g.link * 1e6)
        self.flops_bf16 = gpu(lambda g: g.bf16 * 1e9)
        flops_8 = gpu(lambda g: (g.fp8 or g.bf16) * 1e9)
        flops_4 = gpu(lambda g: (g.fp4 or g.fp8 or g.bf16) * 1e9)
        self.flops = np.choose(self.precision, (self.flops_bf16, flops_8, flops_4, self.flops_bf16))

    def kv_bytes(self, context: Floats) -> Floats:
        """Return the KV bytes of sequences of `context` tokens."""
        short = np.minimum(context, self.window)
        tokens = self.full_layers * context + self.sliding_layers * short
        return tokens * self.kv_layer_bytes + self.state_bytes

    def _floats(self, read: Callable[[Case], float]) -> Floats:
        return np.array([read(case) for case in self._cases], dtype=np.float64)

    def _indices(self, read: Callable[[Case], int]) -> NDArray[np.intp]:
        return np.array([read(case) for case in self._cases], dtype=np.intp)

    def _shape(self, read: Callable[[ModelShape], float]) -> Floats:
        known = cache(read)
        return self._floats(lambda case: known(case.shape))
