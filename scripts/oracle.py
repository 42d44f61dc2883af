"""Make the reference answers that the native engine is tested against.

    python scripts/oracle.py [--out tests/data/oracle/greedy.json] [MODEL.gguf]

Needs torch and transformers (the `oracle` extra). Everything is transformers' own: its GGUF reader
dequantises the weights into a float32 LlamaForCausalLM, its tokenizer and the model's chat template
make the prompts' ids, its forward pass chooses. So weights reader, tokenizer and forward pass of
this project are all checked against something that shares no code with them.
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
    """Read prompts.json, answer, write greedy.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="default: the default model's file")
    parser.add_argument("--out", type=Path, default=DATA / "greedy.json")
    options = parser.parse_args()
    path = options.model or default_model()
    prompts = json.loads((DATA / "prompts.json").read_text())
    model, tokenizer = load(path)
    answers = []
    for prompt in prompts:
        answers.append(answer(model, tokenizer, prompt))
        print(prompt["name"], flush=True)
    about = {"made_by": made_by(), "model": path.name, "tokens": TOKENS}
    lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in answers)
    options.out.write_text(f'{{"about": {json.dumps(about)},\n"answers": [\n{lines}\n]}}\n')


def default_model() -> Path:
    """The default model's GGUF in the user's cache, fetched if need be."""
    from dynamo.models.resolve import resolve_model_blocking

    return resolve_model_blocking("").path


def made_by() -> str:
    """The versions that the answers hang on."""
    import torch
    import transformers

    return f"transformers {transformers.__version__}, torch {torch.__version__}"


def load(path: Path) -> tuple[Any, Any]:
    """Model in float32 and tokenizer, both out of the GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval(), AutoTokenizer.from_pretrained(**where)


def answer(model: Any, tokenizer: Any, prompt: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens (end of sequence or not), and at each step how far the two best logits lie
    apart; the logprobs of the first and the last step."""
    import torch

    text = tokenizer.apply_chat_template(
        prompt["messages"], add_generation_prompt=True, tokenize=False
    )
    prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids: list[int] = []
    gaps: list[float] = []
    logprobs: dict[str, list[list[float]]] = {}
    cache, fed = None, torch.tensor([prompt_ids])
    with torch.inference_mode():
        for step in range(TOKENS):
            out = model(fed, past_key_values=cache, use_cache=True)
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
            fed = torch.tensor([ids[-1:]])
    ended = ids.index(model.config.eos_token_id) if model.config.eos_token_id in ids else TOKENS
    return {
        "name": prompt["name"],
        "prompt_ids": prompt_ids,
        "ids": ids,
        "gaps": gaps,
        "logprobs": logprobs,
        "text": tokenizer.decode(ids[:ended]),
    }


if __name__ == "__main__":
    main()
