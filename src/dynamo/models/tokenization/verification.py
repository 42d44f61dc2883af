"""Run as a process of its own: proves one tokenizer's fast encoder against the reference.

    python -m dynamo.models.tokenization.verification TOKENIZER_JSON VERDICT_JSON

Both libraries are loaded here and nowhere else; the process ends and takes their memory with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dynamo.core.errors import DynamoError
from dynamo.core.parent_death_signal import set_parent_death_signal
from dynamo.models.file_cache import write_atomically
from dynamo.models.tokenization.encoders import (
    Encoder,
    EncoderVerification,
    FastEncoder,
    ReferenceEncoder,
)
from dynamo.models.tokenization.segment_cache import TextSplitter
from dynamo.models.tokenization.tokenizer_file import (
    TokenizerFile,
    can_split_text,
    read_tokenizer_file,
    token_bytes_table,
)
from dynamo.models.tokenization.verification_corpus import verification_texts

_SEGMENT_SIZES = (48, 400)


def compare_encoders(path: Path) -> EncoderVerification:
    """Encode the corpus in every way that is used, and compare."""
    file = read_tokenizer_file(path)
    specials = [token.content for token in file.added_tokens]
    texts = list(verification_texts(token_bytes_table(file), specials))
    reference = ReferenceEncoder(path)
    ids = [reference.encode(text) for text in texts]
    fast, why = _fast_if_equal(path, reference, texts, ids)
    cuts = can_split_text(file) and _segments_give_same_ids(fast or reference, file, texts, ids)
    return EncoderVerification(fast is not None, cuts, len(texts), sum(map(len, texts)), why)


def _fast_if_equal(
    path: Path, reference: Encoder, texts: Sequence[str], ids: Sequence[bytes]
) -> tuple[Encoder | None, str]:
    """The fast encoder, or None and why not."""
    try:
        fast = FastEncoder(path)
        for text, expected in zip(texts, ids, strict=True):
            if fast.encode_without_fallback(text) != expected:
                return None, f"other ids for {text[:200]!r}"
        for text, expected in zip(texts[::7], ids[::7], strict=True):
            if fast.encode_without_fallback(text, False) != reference.encode(text, False):
                return None, f"other ids without special tokens for {text[:200]!r}"
            if fast.encode_with_special_tokens(text) != reference.encode_with_special_tokens(text):
                return None, f"another frame for {text[:200]!r}"
            numbers = memoryview(expected).cast("I").tolist()
            if fast.decode(numbers) != reference.decode(numbers):
                return None, f"other text for the ids of {text[:200]!r}"
    except Exception as error:  # noqa: BLE001 (whatever it raises, it is not equal)
        return None, f"{type(error).__name__}: {error}"
    return fast, ""


def _segments_give_same_ids(
    encoder: Encoder, file: TokenizerFile, texts: Sequence[str], ids: Sequence[bytes]
) -> bool:
    specials = [token.content for token in file.added_tokens]
    for size in _SEGMENT_SIZES:
        splitter = TextSplitter(specials, size)
        for text, expected in zip(texts, ids, strict=True):
            if b"".join(map(encoder.encode, splitter.split(text))) != expected:
                return False
    return True


def main(tokenizer: str, target: str) -> int:
    """Write the verdict; 1 when the tokenizer cannot be read."""
    os.nice(10)
    try:
        found = compare_encoders(Path(tokenizer))
    except DynamoError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    write_atomically(Path(target), msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    set_parent_death_signal()  # nobody waits for the verdict then
    sys.exit(main(*sys.argv[1:]))
