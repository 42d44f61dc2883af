"""Run as a process of its own: proves one tokenizer's fast encoder against the reference.

    python -m dynamo.models.proof TOKENIZER_JSON VERDICT_JSON

Both libraries are loaded here and nowhere else; the process ends and takes their memory with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dynamo.core.errors import DynamoError
from dynamo.core.parent import die_with_parent
from dynamo.models.corpus import proof_texts
from dynamo.models.encoders import Encoder, FastEncoder, ReferenceEncoder, Verdict
from dynamo.models.files import write_atomically
from dynamo.models.segments import Splitter
from dynamo.models.tokenizer_file import (
    TokenizerFile,
    byte_table,
    can_be_cut,
    read_tokenizer_file,
)

_CUTS_CHARS = (48, 400)


def compare(path: Path) -> Verdict:
    """Encode the corpus in every way that is used, and compare."""
    file = read_tokenizer_file(path)
    specials = [token.content for token in file.added_tokens]
    texts = list(proof_texts(byte_table(file), specials))
    reference = ReferenceEncoder(path)
    ids = [reference.encode(text) for text in texts]
    fast, why = _fast_if_equal(path, reference, texts, ids)
    cuts = can_be_cut(file) and _cuts_hold(fast or reference, file, texts, ids)
    return Verdict(fast is not None, cuts, len(texts), sum(map(len, texts)), why)


def _fast_if_equal(
    path: Path, reference: Encoder, texts: Sequence[str], ids: Sequence[bytes]
) -> tuple[Encoder | None, str]:
    """The fast encoder, or None and why not."""
    try:
        fast = FastEncoder(path)
        for text, expected in zip(texts, ids, strict=True):
            if fast.attempt(text) != expected:
                return None, f"other ids for {text[:200]!r}"
        for text, expected in zip(texts[::7], ids[::7], strict=True):
            if fast.attempt(text, False) != reference.encode(text, False):
                return None, f"other ids without special tokens for {text[:200]!r}"
            if fast.framed(text) != reference.framed(text):
                return None, f"another frame for {text[:200]!r}"
            numbers = memoryview(expected).cast("I").tolist()
            if fast.decode(numbers) != reference.decode(numbers):
                return None, f"other text for the ids of {text[:200]!r}"
    except Exception as error:  # noqa: BLE001 (whatever it raises, it is not equal)
        return None, f"{type(error).__name__}: {error}"
    return fast, ""


def _cuts_hold(
    encoder: Encoder, file: TokenizerFile, texts: Sequence[str], ids: Sequence[bytes]
) -> bool:
    specials = [token.content for token in file.added_tokens]
    for size in _CUTS_CHARS:
        splitter = Splitter(specials, size)
        for text, expected in zip(texts, ids, strict=True):
            if b"".join(map(encoder.encode, splitter.pieces(text))) != expected:
                return False
    return True


def main(tokenizer: str, target: str) -> int:
    """Write the verdict; 1 when the tokenizer cannot be read."""
    os.nice(10)
    try:
        found = compare(Path(tokenizer))
    except DynamoError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    write_atomically(Path(target), msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    die_with_parent()  # nobody waits for the verdict then
    sys.exit(main(*sys.argv[1:]))
