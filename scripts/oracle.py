"""Generate the reference answers for the tests of the native engine.

    python scripts/oracle.py [--out tests/data/oracle/greedy.json] [MODEL.gguf]

Needs torch and transformers (the `oracle` extra). The GGUF reader of transformers dequantises the
weights into a float32 LlamaForCausalLM. Its tokenizer and the model's chat template make the
prompts' ids, and its forward pass chooses the tokens. The reference therefore shares no code with
this project's weights reader, tokenizer and forward pass.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

TOKENS = 64
TOP = 5
DATA = Path(__file__).parent.parent / "tests" / "data" / "oracle"


def main() -> None:
    """Read prompts.json, generate answers and write greedy.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="default: the default model's file")
    parser.add_argument("--out", type=Path, default=DATA / "greedy.json")
    options = parser.parse_args()
    path = options.model or default_model()
    prompts = json.loads((DATA / "prompts.json").read_text())
    model, tokenizer = load(path)
    answers = []
    for prompt in prompts:
        answers.append(generate(model, tokenizer, prompt))
        print(prompt["name"], flush=True)
    metadata = {"made_by": library_versions(), "model": path.name, "tokens": TOKENS}
    lines = ",\n".join(json.dumps(answer, ensure_ascii=False) for answer in answers)
    options.out.write_text(f'{{"about": {json.dumps(metadata)},\n"answers": [\n{lines}\n]}}\n')


def default_model() -> Path:
    """Return the default model's GGUF file from the user's cache, downloading it if necessary."""
    from dynamo.models.resolve import resolve_model_blocking

    return resolve_model_blocking("").path


def library_versions() -> str:
    """Return the versions of the libraries that generate the answers."""
    import torch
    import transformers

    return f"transformers {transformers.__version__}, torch {torch.__version__}"


def load(path: Path) -> tuple[Any, Any]:
    """Load the float32 model and the tokenizer from the GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval(), AutoTokenizer.from_pretrained(**source)


def generate(model: Any, tokenizer: Any, prompt: dict[str, Any]) -> dict[str, Any]:
    """Generate TOKENS greedy tokens, also beyond the end of sequence. The result has the gap
    between the two best logits of every step, and the logprobs of the first and the last step."""
    import torch

    text = tokenizer.apply_chat_template(
        prompt["messages"], add_generation_prompt=True, tokenize=False
    )
    prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids: list[int] = []
    gaps: list[float] = []
    logprobs: dict[str, list[list[float]]] = {}
    cache, inputs = None, torch.tensor([prompt_ids])
    with torch.inference_mode():
        for step in range(TOKENS):
            out = model(inputs, past_key_values=cache, use_cache=True)
            cache, logits = out.past_key_values, out.logits[0, -1]
            best = logits.topk(2)
            ids.append(int(best.indices[0]))
            gaps.append(round(float(best.values[0] - best.values[1]), 5))
            if step in {0, TOKENS - 1}:
                top = logits.log_softmax(-1).topk(TOP)
                logprobs[str(step)] = [
                    [int(token), round(float(value), 5)]
                    for token, value in zip(top.indices, top.values, strict=True)
                ]
            inputs = torch.tensor([ids[-1:]])
    eos = model.config.eos_token_id
    length = ids.index(eos) if eos in ids else TOKENS
    return {
        "name": prompt["name"],
        "prompt_ids": prompt_ids,
        "ids": ids,
        "gaps": gaps,
        "logprobs": logprobs,
        "text": tokenizer.decode(ids[:length]),
    }


if __name__ == "__main__":
    main()
