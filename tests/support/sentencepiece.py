"""Small tokenizers that write spaces as ▁, with the steps of the models' own tokenizer.json files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library
from tokenizers.trainers import BpeTrainer, UnigramTrainer

SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world, how are you?",
    "Yes, I think that the answer is 42: the sum of the two numbers.",
    '{"name": "weather", "arguments": {"city": "Rome"}}\n  if x == 1:\n    return y',
]
TO_TEXT = (decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse())


def write_tokenizer(path: Path, family: str, special: tuple[str, ...] = ()) -> Path:
    """Write a tokenizer.json like those of a family.

    "llama" has a space before each text, which the decoder drops at the beginning. "mistral" has it
    at the beginning alone. "gemma" has none. "t5" is Unigram, without byte fallback.
    """
    library = _train(family, ["<unk>", "<s>", "</s>", *special])
    library.add_special_tokens(
        [AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>", *special)]
    )
    if family != "t5":
        library.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    document = json.loads(library.to_str())
    document["added_tokens"] = [
        token for token in document["added_tokens"] if token["content"] not in BYTES
    ]
    path.write_text(json.dumps(document))
    return path


def _train(family: str, special: list[str]) -> Library:
    library: Any
    if family == "t5":
        library = Library(models.Unigram())
        library.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer: Any = UnigramTrainer(
            vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False
        )
        library.decoder = decoders.Metaspace()
        library.train_from_iterator(CORPUS * 3, trainer)
        return library
    library = Library(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", SPACE)
    if family == "mistral":
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        steps = [normalizers.Prepend(SPACE), spaces] if family == "llama" else [spaces]
        library.normalizer = normalizers.Sequence(steps)
    library.decoder = decoders.Sequence(
        [*TO_TEXT] if family == "gemma" else [*TO_TEXT, decoders.Strip(" ", 1, 0)]
    )
    words = [word for line in CORPUS for word in line.split(" ")]
    trainer = BpeTrainer(
        vocab_size=700, special_tokens=[*special, *BYTES], limit_alphabet=80, show_progress=False
    )
    library.train_from_iterator([*CORPUS, *words * 2], trainer)
    return library
