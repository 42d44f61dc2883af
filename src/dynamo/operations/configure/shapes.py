"""The shape of a model: its weights, KV and layers, counted from a config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError

WEIGHT_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.53, "fp4": 0.56}
"""Bytes of a weight with its share of the scales, by precision."""
KV_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0}


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes that a step of a model depends on. Weights are counted, not in bytes: every step
    reads the `dense_weights`, and the share of `routed_weights` that its tokens choose.
    `kv_values` are kept for each token and layer of full attention. `precision` is of the experts
    in a model that has some, else of all layers; `dense_precision` is of the rest."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_values: int
    full_layers: int
    sliding_layers: int = 0
    window: int = 0
    state_values: int = 0
    latent: bool = False
    dense_weights: float
    embedding_weights: float
    routed_weights: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    moe_layers: int = 0
    context_tokens: int = 0
    precision: str = "bf16"
    dense_precision: str = "bf16"

    @property
    def weights(self) -> float:
        """All weights of the model."""
        return self.dense_weights + self.embedding_weights + self.routed_weights

    @property
    def active_weights(self) -> float:
        """Weights that one token is multiplied with."""
        share = self.experts_per_token / self.experts if self.experts else 0.0
        return self.dense_weights + self.routed_weights * share

    def with_precision(self, precision: str) -> ModelShape:
        """Return the shape with weights of another precision."""
        beside = self.experts and precision in {"fp4", "int4"}
        dense = self.dense_precision if beside else precision
        return msgspec.structs.replace(self, precision=precision, dense_precision=dense)

    def weight_bytes(self) -> float:
        """Return the size of all weights in bytes."""
        dense = self.dense_weights * WEIGHT_BYTES[self.dense_precision]
        return dense + self.embedding_weights * 2 + self.routed_bytes()

    def routed_bytes(self) -> float:
        """Return the size of the routed experts in bytes."""
        return self.routed_weights * WEIGHT_BYTES[self.precision]

    def kv_bytes_per_token(self, kv_precision: str) -> float:
        """Return the KV bytes of one more token of a long context."""
        return self.full_layers * self.kv_values * KV_BYTES[kv_precision]


def read_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """Count a model's shape from the content of its config.json. Raises `ConfigError`."""
    return _ConfigReader(config, name).read()


class _ConfigReader:
    """A reader of one config.json. Multimodal models keep the part read here in `text_config`."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        text = config.get("text_config") or config.get("llm_config") or {}
        if not isinstance(text, Mapping):
            raise ConfigError(f"{name}: text_config is no object")
        self._config = {**config, **text}
        self._name = name

    def read(self) -> ModelShape:
        layers = self._count("num_hidden_layers", "n_layer")
        hidden = self._count("hidden_size", "n_embd")
        heads = self._count("num_attention_heads", "n_head")
        kv_heads = self._count("num_key_value_heads", default=heads)
        latent_rank = self._count("kv_lora_rank", default=0)
        head_dim = self._head_dim(hidden, heads, latent=latent_rank > 0)
        if kv_heads > heads or heads % kv_heads:
            raise ConfigError(
                f"{self._name}: {heads} attention heads do not share {kv_heads} KV heads evenly"
            )
        full, sliding, linear = self._attention_layers(layers)
        rope = self._count("qk_rope_head_dim", default=64)
        vocab = self._count("vocab_size")
        moe_layers, routed, shared = self._experts(layers, hidden)
        inner = self._count("intermediate_size", "n_inner", "ffn_hidden_size", default=4 * hidden)
        dense = (full + sliding) * self._attention_weights(hidden, heads, kv_heads, head_dim)
        dense += linear * self._linear_weights(hidden)
        dense += (layers - moe_layers) * 3 * hidden * inner + moe_layers * shared + vocab * hidden
        precision, dense_precision = self._precisions(expert=moe_layers > 0)
        return ModelShape(
            name=self._name,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=1 if latent_rank else kv_heads,
            head_dim=head_dim,
            kv_values=latent_rank + rope if latent_rank else 2 * kv_heads * head_dim,
            full_layers=full,
            sliding_layers=sliding,
            window=self._count("sliding_window", default=0) if sliding else 0,
            state_values=linear * self._linear_state(),
            latent=latent_rank > 0,
            dense_weights=float(dense),
            embedding_weights=0.0
            if self._config.get("tie_word_embeddings")
            else float(vocab * hidden),
            routed_weights=float(moe_layers * routed),
            experts=self._count(*EXPERT_KEYS, default=0) if moe_layers else 0,
            experts_per_token=self._chosen() if moe_layers else 0,
            moe_layers=moe_layers,
            context_tokens=self._count("max_position_embeddings", "n_positions", default=0),
            precision=precision,
            dense_precision=dense_precision,
        )

    def _count(self, *keys: str, default: int | None = None) -> int:
        """Return the first of `keys` that is there. Raises `ConfigError`."""
        for key in keys:
            value = self._config.get(key)
            if value is None:
                continue
            least = 0 if default == 0 else 1
            if type(value) is not int or not least <= value <= 10**9:
                raise ConfigError(f"{self._name}: {key} is {value!r}, expected a positive number")
            return value
        if default is None:
            raise ConfigError(
                f"{self._name}: config.json lacks {keys[0]}",
                hint="the model's own config.json has it; a part of one is not enough",
            )
        return default

    def _head_dim(self, hidden: int, heads: int, *, latent: bool) -> int:
        if latent:
            keys = self._count("qk_nope_head_dim", default=128)
            keys += self._count("qk_rope_head_dim", default=64)
            return (keys + self._count("v_head_dim", default=128)) // 2
        return self._count("head_dim", default=max(1, hidden // heads))

    def _attention_weights(self, hidden: int, heads: int, kv_heads: int, head_dim: int) -> int:
        """Return the weights of one layer's attention."""
        rank = self._count("kv_lora_rank", default=0)
        if not rank:
            gate = heads if self._config.get("attn_output_gate") else 0
            return hidden * head_dim * (2 * heads + 2 * kv_heads + gate)
        rope, nope = (self._count(f"qk_{part}_head_dim") for part in ("rope", "nope"))
        value = self._count("v_head_dim")
        queries = heads * (nope + rope)
        low = self._count("q_lora_rank", default=0)
        weights = low * (hidden + queries) if low else hidden * queries
        weights += hidden * (rank + rope) + rank * heads * (nope + value)
        return weights + heads * value * hidden

    def _attention_layers(self, layers: int) -> tuple[int, int, int]:
        """Return the numbers of layers with full, sliding and linear attention."""
        kinds = self._config.get("layer_types")
        if isinstance(kinds, Sequence) and len(kinds) == layers:
            sliding = sum(kind in {"sliding_attention", "chunked_attention"} for kind in kinds)
            linear = sum(kind in {"linear_attention", "mamba"} for kind in kinds)
        else:
            every = self._count("full_attention_interval", default=0)
            linear = layers - layers // every if every else 0
            pattern = self._count("sliding_window_pattern", default=0)
            sliding = layers - layers // pattern if pattern else 0
            uses = self._config.get("use_sliding_window", "Mistral" in str(self._config))
            if not pattern and uses and self._config.get("sliding_window"):
                sliding = layers - linear
        return layers - sliding - linear, sliding, linear

    def _linear_weights(self, hidden: int) -> int:
        keys, values = self._linear_sizes()
        return hidden * (2 * keys + 3 * values)

    def _linear_sizes(self) -> tuple[int, int]:
        keys = self._count("linear_num_key_heads", default=0)
        values = self._count("linear_num_value_heads", default=0)
        key_dim = self._count("linear_key_head_dim", default=128)
        return keys * key_dim, values * self._count("linear_value_head_dim", default=128)

    def _linear_state(self) -> int:
        """Return the values that one linear layer keeps for a sequence."""
        _, values = self._linear_sizes()
        return values * self._count("linear_key_head_dim", default=128)

    def _experts(self, layers: int, hidden: int) -> tuple[int, int, int]:
        """Return the layers with experts, and a layer's weights of routed and shared experts."""
        experts = self._count(*EXPERT_KEYS, default=0)
        if experts < 2:
            return 0, 0, 0
        step = self._count("decoder_sparse_step", "interleave_moe_layer_step", default=1)
        dense = self._count("first_k_dense_replace", default=0)
        skipped = self._config.get("mlp_only_layers") or ()
        inner = self._count("moe_intermediate_size", "intermediate_size")
        shared = self._count("shared_expert_intermediate_size", default=0)
        shared = shared or self._count("n_shared_experts", default=0) * inner
        moe_layers = max(0, layers - dense - len(skipped)) // step
        return moe_layers, experts * 3 * hidden * inner, hidden * (3 * shared + experts)

    def _chosen(self) -> int:
        return self._count("num_experts_per_tok", "num_experts_per_token", "experts_per_token")

    def _precisions(self, *, expert: bool) -> tuple[str, str]:
        """Return the precisions of the experts (of all layers without any) and of the rest."""
        plain = str(self._config.get("torch_dtype") or self._config.get("dtype") or "bfloat16")
        base = "fp16" if plain == "float16" else "bf16"
        quantised = self._config.get("quantization_config")
        if not isinstance(quantised, Mapping):
            return base, base
        short = _quantised_precision(quantised)
        if not short:
            raise ConfigError(
                f"{self._name}: unknown quantization_config",
                hint="--precision fp8 (or fp4, int4, int8, bf16) says what the weights are",
            )
        return short, base if expert and short in {"fp4", "int4"} else short


EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")


def _quantised_precision(quantised: Mapping[str, Any]) -> str:
    """Return the precision that a quantization_config means; empty if unknown."""
    text = msgspec.json.encode(quantised).decode().lower()
    bits = quantised.get("bits") or quantised.get("num_bits")
    for words, precision in (
        (("fp4",), "fp4"),
        (('"fp8', "float8", "_fp8"), "fp8"),
        (("int4", "w4a16", '"num_bits":4'), "int4"),
        (("int8", "w8a8", '"num_bits":8'), "int8"),
    ):
        if any(word in text for word in words):
            return precision
    return {4: "int4", 8: "int8"}.get(bits, "") if isinstance(bits, int) else ""
