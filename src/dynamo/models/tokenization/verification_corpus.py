"""Texts on which encoders must agree: prose, code, all scripts, white space, random text.

The texts are deterministic. Their sources are in every installation: the interpreter's
documentation and source files, the table of Unicode, and the tokenizer's tokens.
"""

# ruff: noqa: RUF001 (unusual characters are intended)
from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random


def _split_words(*lines: str) -> list[str]:
    return " ".join(lines).split(" ")


_SPACES = " \n\t\r\u00a0\u3000\u200b\u2028\x0b\x0c\x85\u1680"
_WORDS = _split_words(
    "the of and I'm you're can't WE'LL it's O'Neill naïve Straße Привет мир γειά σου",
    "नमस्ते दुनिया สวัสดี 你好，世界。 こんにちは、世界。 안녕하세요 세계 שלום مرحبا بالعالم",
    "e\u0301 \u1112\u1161\u11ab 👩\u200d👩\u200d👧 🇫🇷 ﬁ ﷺ x² 3.14159 1,000,000 0x1F ٣٤٥ Ⅷ ½ I'd",
    'foo_bar(baz) => {a[0]} != None; // http://x.y/?q=1&r=%20 <b>&amp;</b> --flag="v"',
)
_REPEATED_STRINGS = [*_split_words("a A é 中 ! - = . ' 1 👍 \u0301"), " ", "\n", "\t"]


def verification_texts(
    token_bytes: Sequence[bytes | None], specials: Sequence[str], seed: int = 0
) -> Iterator[str]:
    """Yield a few thousand texts of about 1.5 million characters in all."""
    chance = Random(seed)
    yield ""
    yield from _document_texts()
    yield from _script_texts(chance)
    yield from _repeated_texts()
    for _ in range(400):
        yield _mixed_text(chance, 40)
        yield _vocabulary_text(chance, token_bytes)
    for _ in range(300):
        yield "".join(chance.choices(_SPACES + "a!1é", k=30))
        yield "".join(chance.choices(_WORDS, k=12)) + chance.choice(_SPACES)
        yield _text_with_specials(chance, specials)


def _document_texts() -> Iterator[str]:
    """Yield parts of the interpreter's documentation and source files."""
    with suppress(ImportError):  # some distributions package it separately
        from pydoc_data.topics import topics

        for name in sorted(topics)[::3]:
            yield topics[name][:6000]
    sources = sorted(Path(os.__file__).parent.glob("[a-f]*.py"))
    for path in sources[::4]:
        text = path.read_text(encoding="utf-8", errors="replace")
        yield text[:12000]
        yield text[:3000].replace("\n", "\r\n")


def _script_texts(chance: Random) -> Iterator[str]:
    """Yield all assigned characters of the first plane and a part of the others."""
    assigned = [
        chr(number)
        for number in [*range(0xD800), *range(0xE000, 0x10000), *range(0x10000, 0x32000, 5)]
        if unicodedata.category(chr(number)) not in {"Cn", "Co"}
    ]
    hard = [char for char in assigned if not "\u3400" <= char <= "\ud7a3"]
    plain = [char for char in assigned if "\u3400" <= char <= "\ud7a3"][::9]
    for chars in (hard, plain):
        chance.shuffle(chars)
        for start in range(0, len(chars), 60):
            between = chance.choices(("", "", " ", "a", "\n", "'s ", "  "), k=60)
            part = chars[start : start + 60]
            yield "".join(char + extra for char, extra in zip(part, between, strict=False))


def _repeated_texts() -> Iterator[str]:
    for char in _REPEATED_STRINGS:
        for length in (2, 3, 7, 33, 400, 3000):
            yield char * length
            yield f"x{char * length}y {char * length} z"


def _mixed_text(chance: Random, count: int) -> str:
    words = chance.choices(_WORDS, k=count)
    gaps = chance.choices((" ", " ", " ", "  ", "\n", "\n\n", ", ", "", ".\n", "\t"), k=count)
    return "".join(word + gap for word, gap in zip(words, gaps, strict=True))


def _vocabulary_text(chance: Random, token_bytes: Sequence[bytes | None]) -> str:
    if not token_bytes:
        return ""
    picked = chance.choices(token_bytes, k=60)
    return b"".join(raw for raw in picked if raw is not None).decode(errors="replace")


def _text_with_specials(chance: Random, specials: Sequence[str]) -> str:
    parts = [_mixed_text(chance, 5) for _ in range(4)]
    for special in chance.choices(specials, k=4) if specials else ():
        cut = chance.randrange(len(special) + 1)
        parts.append(chance.choice((special, special, special[:cut], special[cut:])))
        parts.append(chance.choice((" ", "", "\n", "a")))
    chance.shuffle(parts)
    return "".join(parts)
