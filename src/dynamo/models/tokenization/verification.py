"""Comparison of a tokenizer's fast encoder with the reference, in a separate process.

    python -m dynamo.models.tokenization.verification TOKENIZER_JSON RESULT_JSON

Only this process loads both libraries. Their memory is freed when it ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dynamo.core.errors import DynamoError
from dynamo.core.host.parent_death_signal import set_parent_death_signal
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
    """Compare the encoders on the verification corpus, in all modes of encoding and decoding."""
    file = read_tokenizer_file(path)
    specials = [token.content for token in file.added_tokens]
    texts = list(verification_texts(token_bytes_table(file), specials))
    reference = ReferenceEncoder(path)
    ids = [reference.encode(text) for text in texts]
    fast, difference = _fast_if_equal(path, reference, texts, ids)
    cuts = can_split_text(file) and _segments_give_same_ids(fast or reference, file, texts, ids)
    return EncoderVerification(fast is not None, cuts, len(texts), sum(map(len, texts)), difference)


def _fast_if_equal(
    path: Path, reference: Encoder, texts: Sequence[str], ids: Sequence[bytes]
) -> tuple[Encoder | None, str]:
    """Return the fast encoder if it equals the reference, else None and the difference."""
    try:
        fast = FastEncoder(path)
        for text, expected in zip(texts, ids, strict=True):
            if fast.encode_without_fallback(text) != expected:
                return None, f"different ids for {text[:200]!r}"
        for text, expected in zip(texts[::7], ids[::7], strict=True):
            if fast.encode_without_fallback(text, False) != reference.encode(text, False):
                return None, f"different ids without special tokens for {text[:200]!r}"
            if fast.encode_with_special_tokens(text) != reference.encode_with_special_tokens(text):
                return None, f"different added special tokens for {text[:200]!r}"
            numbers = memoryview(expected).cast("I").tolist()
            if fast.decode(numbers) != reference.decode(numbers):
                return None, f"different text for the ids of {text[:200]!r}"
    except Exception as error:  # noqa: BLE001 (any error is a difference)
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
    """Write the result to `target`. Returns 1 if the tokenizer cannot be read."""
    os.nice(10)
    try:
        verification = compare_encoders(Path(tokenizer))
    except DynamoError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    write_atomically(Path(target), msgspec.json.encode(verification))
    return 0


if __name__ == "__main__":
    set_parent_death_signal()  # the parent is the only reader of the result
    sys.exit(main(*sys.argv[1:]))
