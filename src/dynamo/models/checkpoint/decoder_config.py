"""The description of a decoder-only transformer, and how its rotary frequencies are scaled."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec

if TYPE_CHECKING:
    from typing import Any

    import numpy as np

    from dynamo.models.checkpoint.quantization import Floats

_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]


class RopeScaling(msgspec.Struct, frozen=True):
    """Scaling of rotary frequencies for long contexts. `attention_factor` 0: the kind's own."""

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: _Positive = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: _Count = 8192
    beta_fast: _Positive = 32.0
    beta_slow: _Positive = 1.0
    attention_factor: float = 0.0
    short_factor: tuple[_Positive, ...] = ()
    long_factor: tuple[_Positive, ...] = ()


class DecoderConfig(msgspec.Struct, frozen=True):
    """Dimensions and parts of a decoder. The defaults are Llama's.

    - `tied`: the output matrix is the embedding matrix.
    - `rotary_dim`: the leading dimensions of a head that are rotated; 0: all.
    - `windows`: for each layer the positions that it attends to, 0 for all; (): all in all layers.
    - `local_rope_theta`: the base of layers with a window, which are not scaled; 0: as the others.
    - `unrotated`: layers without rotary embedding.
    - `norms`: RMS norms before attention and MLP, after them, or around.
    - `qk_norm`: RMS norm of queries and keys, of each head or of all heads together.
    - `biases`: the projections of attention with a bias.
    - `query_scale`: the factor of scores; 0: 1 / sqrt(head_dim). `attention_softcap` and
      `logit_softcap` bound scores and logits by c * tanh(x / c); 0: they do not.
    - `residual_scale`: the factor of what attention and MLP add.
    """

    hidden_size: _Count
    intermediate_size: _Count
    num_layers: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    num_heads: _Count
    num_kv_heads: _Count
    head_dim: _Count
    vocab_size: _Count
    context_tokens: _Count
    norm_eps: float
    rope_theta: _Positive
    rope_scaling: RopeScaling | None = None
    tied: bool = False
    rotary_dim: Annotated[int, msgspec.Meta(ge=0)] = 0
    windows: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()
    local_rope_theta: float = 0.0
    unrotated: tuple[int, ...] = ()
    activation: Literal["silu", "gelu_tanh"] = "silu"
    norms: Literal["before", "around", "after"] = "before"
    qk_norm: Literal["", "head", "all"] = ""
    biases: tuple[str, ...] = ()
    query_scale: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0

    def count_weights(self) -> int:
        """Count the elements of all matrices; vectors are negligible."""
        heads = self.num_heads + self.num_kv_heads  # q and o, k and v
        layer = 2 * heads * self.head_dim + 3 * self.intermediate_size
        vocabulary = self.vocab_size * (1 if self.tied else 2)
        return self.hidden_size * (self.num_layers * layer + vocabulary)

    def window(self, layer: int) -> int:
        """Return how many positions a layer attends to, its own included; 0: all."""
        return self.windows[layer] if self.windows else 0

    @property
    def scores_scale(self) -> float:
        """The factor of the products of queries and keys."""
        return self.query_scale or 1.0 / math.sqrt(self.head_dim)


class Rotary(NamedTuple):
    """A rotary embedding: the frequency of each pair, [rotary_dim / 2], and the factor of rotated
    queries and keys."""

    frequencies: np.ndarray[Any, np.dtype[np.float64]]
    factor: float = 1.0


def norm_names(config: DecoderConfig) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return the names of the norms before attention and MLP, and after them; "" for none."""
    after = ("post_attention_layernorm", "post_feedforward_layernorm")
    if config.norms == "before":
        return ("input_layernorm", "post_attention_layernorm"), ("", "")
    if config.norms == "around":
        return ("input_layernorm", "pre_feedforward_layernorm"), after
    return ("", ""), after


def layer_parts(config: DecoderConfig) -> tuple[str, ...]:
    """Return the names of a layer's tensors, without those of its number."""
    before, after = norm_names(config)
    norms = [name for name in (*before, *after) if name]
    norms += ["self_attn.q_norm", "self_attn.k_norm"] if config.qk_norm else []
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    mlp = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    biases = [f"self_attn.{name}.bias" for name in config.biases]
    return (*(f"{name}.weight" for name in (*norms, *attention, *mlp)), *biases)


def tensor_shape(name: str, config: DecoderConfig) -> tuple[int, ...]:
    """Return the shape of the tensor with this Hugging Face name; () if it is unknown."""
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    by_head = config.qk_norm == "head"
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (vocab, hidden),
        "lm_head": (vocab, hidden),
        "norm": (hidden,),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "pre_feedforward_layernorm": (hidden,),
        "post_feedforward_layernorm": (hidden,),
        "q_norm": (config.head_dim if by_head else queries,),
        "k_norm": (config.head_dim if by_head else keys,),
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "qkv_proj": (queries + 2 * keys, hidden),
        "gate_up_proj": (2 * inner, hidden),
        "rope_freqs": ((config.rotary_dim or config.head_dim) // 2,),
    }
    part, _, kind = name.rpartition(".")
    shape = shapes.get(part.rpartition(".")[2], ())
    return shape[:1] if kind == "bias" else shape


def plain_frequencies(config: DecoderConfig, theta: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the rotary frequencies of this base, not scaled: [rotary_dim / 2] float64."""
    import numpy as np

    half = (config.rotary_dim or config.head_dim) // 2
    return 1.0 / theta ** (np.arange(half, dtype=np.float64) / half)


def rope_divisors(config: DecoderConfig, context_tokens: int = 0) -> Floats:
    """Return the divisors of the rotary frequencies, [rotary_dim / 2] float32, for an engine of
    this context; 0: the model's. Source: transformers' `modeling_rope_utils`."""
    import numpy as np

    dim, scaling = config.rotary_dim or config.head_dim, config.rope_scaling
    half, context = dim // 2, context_tokens or config.context_tokens
    if scaling is None:
        return np.ones(half, np.float32)
    if scaling.kind == "linear":
        return np.full(half, scaling.factor, np.float32)
    if scaling.kind == "longrope":
        is_long = context > scaling.original_context
        return np.array(scaling.long_factor if is_long else scaling.short_factor, np.float32)
    pairs = np.arange(half, dtype=np.float64)
    if scaling.kind == "dynamic":
        stretch = max(context / scaling.original_context, 1.0) * scaling.factor
        base = stretch - scaling.factor + 1.0
        return np.asarray(base ** (2 * pairs / (dim - 2)), np.float32)
    wavelengths = 2 * math.pi * config.rope_theta ** (pairs * 2 / dim)
    blend: np.ndarray[Any, np.dtype[np.float64]]
    if scaling.kind == "yarn":
        blend = _yarn_blend(config, scaling, dim)
    else:
        turns = scaling.original_context / wavelengths
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    # blend 1: unscaled, 0: divided by the factor
    return np.asarray(1.0 / ((1.0 - blend) / scaling.factor + blend), np.float32)


def _yarn_blend(config: DecoderConfig, scaling: RopeScaling, dim: int) -> Any:
    import numpy as np

    def pair_of(turns: float) -> float:
        """Return the pair that turns so often within the original context."""
        wavelength = scaling.original_context / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    low = max(math.floor(pair_of(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_of(scaling.beta_slow)), dim - 1)
    ramp = (np.arange(dim // 2) - low) / (high - low if high > low else 0.001)
    return 1.0 - np.clip(ramp, 0.0, 1.0)


def attention_factor(config: DecoderConfig) -> float:
    """Return the factor of rotated queries and keys."""
    scaling = config.rope_scaling
    if scaling is None or scaling.kind not in {"yarn", "longrope"}:
        return 1.0
    if scaling.attention_factor:
        return scaling.attention_factor
    if scaling.kind == "yarn":
        return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    factor = config.context_tokens / scaling.original_context
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(scaling.original_context))
