"""Generate the reference answers for the architectures that the native engine computes.

    python scripts/shapes_oracle.py [--out tests/data/oracle/shapes.json] [NAME ...]

Needs torch and transformers (the `oracle` extra). Each case is a small random model of some type.
Its weights follow from the names and shapes of its tensors (`random_tensor`), so that none are
committed. transformers computes greedy answers to random prompts in float32.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

TOKENS = 64
PROMPT_LENGTHS = (1, 7, 40, 90, 150)
VOCABULARY = 160
OUT = Path(__file__).parent.parent / "tests" / "data" / "oracle" / "shapes.json"

BASE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": None,
    "pad_token_id": None, "rope_theta": 10000.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "short_factor": [1.0 + 0.1 * n for n in range(6)],
    "long_factor": [1.5 + n for n in range(6)],
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-biases": {"model_type": "llama", "attention_bias": True},
    "llama-head-dim": {"model_type": "llama", "head_dim": 24},
    "llama-linear": {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama-dynamic": {
        "model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    },
    "llama-llama3": {"model_type": "llama", "rope_scaling": LLAMA3, "tie_word_embeddings": True},
    "llama-yarn": {"model_type": "llama", "rope_scaling": YARN},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 24},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-window": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16,
        "max_window_layers": 2, "rope_scaling": YARN,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "gemma2": {
        "model_type": "gemma2", "head_dim": 32, "query_pre_attn_scalar": 48, "sliding_window": 24,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text", "head_dim": 32, "query_pre_attn_scalar": 48,
        "sliding_window": 20, "num_hidden_layers": 7, "tie_word_embeddings": True,
        "rope_local_base_freq": 1000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "phi3": {"model_type": "phi3", "sliding_window": 30},
    "phi4-mini": {
        "model_type": "phi3", "partial_rotary_factor": 0.75, "rope_scaling": LONG,
        "original_max_position_embeddings": 1024, "max_position_embeddings": 1024,
    },
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 5},
    "olmo2": {"model_type": "olmo2"},
    "granite": {
        "model_type": "granite", "attention_multiplier": 0.3, "embedding_multiplier": 4.0,
        "residual_multiplier": 0.4, "logits_scaling": 0.5,
    },
}  # fmt: skip


def random_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the weights that a tensor of this name and shape has in all cases."""
    generator = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    spread, middle = (0.3, 0.0) if len(shape) > 1 else (0.2, 0.0 if "bias" in name else 0.8)
    return (generator.standard_normal(shape) * spread + middle).astype(np.float32)


def random_prompts(name: str) -> list[list[int]]:
    """Return the token ids of the prompts of a case."""
    generator = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    return [generator.integers(0, VOCABULARY, length).tolist() for length in PROMPT_LENGTHS]


def main() -> None:
    """Compute the cases and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases (default: all)")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    names = options.names or CASES
    cases = [compute_case(name) for name in names]
    metadata = json.dumps({"made_by": library_versions(), "tokens": TOKENS})
    lines = ",\n".join(json.dumps(case) for case in cases)
    options.out.write_text(f'{{"about": {metadata},\n"cases": [\n{lines}\n]}}\n')


def library_versions() -> str:
    """Return the versions of the libraries that generate the answers."""
    import torch
    import transformers

    return f"transformers {transformers.__version__}, torch {torch.__version__}"


def compute_case(name: str) -> dict[str, Any]:
    """Return the case with its config.json, the shapes of its tensors and the answers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(BASE | CASES[name]))
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        model.config.save_pretrained(folder)
        written = json.loads(path.read_text())
    state = model.state_dict()
    tensors = {key: list(value.shape) for key, value in state.items() if "inv_freq" not in key}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    with torch.no_grad():
        for key, shape in tensors.items():
            state[key].copy_(torch.from_numpy(random_tensor(key, tuple(shape))))
    answers = [greedy(model, prompt) for prompt in random_prompts(name)]
    gap = min(min(answer["gaps"]) for answer in answers)
    print(f"{name}: smallest gap {gap:.5f}", flush=True)
    return {
        "name": name,
        "given": BASE | CASES[name],
        "saved": written,
        "tensors": tensors,
        "answers": answers,
    }


def greedy(model: Any, prompt: list[int]) -> dict[str, Any]:
    """Generate TOKENS greedy tokens, with the gap between the two best logits of every step. Every
    step computes the whole sequence, without a cache."""
    import torch

    ids: list[int] = []
    gaps: list[float] = []
    with torch.inference_mode():
        for _ in range(TOKENS):
            logits = model(torch.tensor([prompt + ids]), use_cache=False).logits[0, -1]
            best = logits.topk(2)
            ids.append(int(best.indices[0]))
            gaps.append(round(float(best.values[0] - best.values[1]), 6))
    return {"ids": ids, "gaps": gaps}


if __name__ == "__main__":
    main()
