"""Words that are one token each, so that a prompt of N words has N tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo.core.errors import ConfigError
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.tasks import run_all
from dynamo.operations.bench.load_client import LoadClient, Unreachable

if TYPE_CHECKING:
    from dynamo.models.tokenization.tokenizer import Tokenizer

CANDIDATES = tuple(files(__package__).joinpath("common_words.txt").read_text("ascii").split())
"""The most common English words."""
MIN_WORDS = 8
MAX_CONCURRENT_CALLS = 16
CHECKED_WORDS = 200


def words_from_tokenizer(folder: str) -> Sequence[str]:
    """Return the common words that are one token for the tokenizer in `folder`. Raises
    `ConfigError`. Blocks."""
    tokenizer = _load_tokenizer(folder)
    return _require_enough_words(
        [word for word in CANDIDATES if len(tokenizer.encode(f" {word}")) == TOKEN_BYTES]
    )


def _load_tokenizer(folder: str) -> Tokenizer:
    from dynamo.models.tokenization.tokenizer import load_tokenizer

    path = Path(folder)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"no tokenizer in {folder}", hint="name a folder with tokenizer.json")
    return load_tokenizer(path)


def token_counter_from_tokenizer(folder: str) -> Callable[[str], int]:
    """Return a function that counts a text's tokens with the tokenizer in `folder`. Blocks."""
    tokenizer = _load_tokenizer(folder)
    return lambda text: len(tokenizer.encode(text)) // TOKEN_BYTES


async def words_from_server(server: LoadClient, model: str) -> Sequence[str]:
    """Return the common words that are one token for the server's /tokenize. Raises
    `Unreachable`."""
    await count_tokens(server, model, " the")
    calls = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def is_single_token(word: str) -> bool:
        async with calls:
            return await count_tokens(server, model, f" {word}") == 1

    single = await run_all(*(is_single_token(word) for word in CANDIDATES))
    words = _require_enough_words(
        [word for word, is_single in zip(CANDIDATES, single, strict=True) if is_single]
    )
    text = "".join(f" {words[index % len(words)]}" for index in range(CHECKED_WORDS))
    if await count_tokens(server, model, text) != CHECKED_WORDS:
        raise Unreachable(
            "the model does not tokenize a text word by word",
            hint="give the tokenizer with --tokenizer FOLDER",
        )
    return words


async def count_tokens(server: LoadClient, model: str, text: str) -> int:
    """Return the server's token count of `text`. Raises `Unreachable` if /tokenize fails."""
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    status, response = await server.fetch_json("/tokenize", body)
    if status != 200 or not isinstance(response, dict) or "tokens" not in response:
        raise _tokenize_error(status, response)
    return len(response["tokens"])


def _tokenize_error(status: int, response: object) -> Unreachable:
    body = response.get("error") if isinstance(response, dict) else None
    error = body if isinstance(body, dict) else {}
    hint = "--model names another model; a server without /tokenize needs --tokenizer FOLDER"
    message = f"/tokenize answers {status} {error.get('message') or ''}".strip()
    return Unreachable(message, hint=error.get("hint") or hint)


def _require_enough_words(words: Sequence[str]) -> Sequence[str]:
    if len(words) < MIN_WORDS:
        raise ConfigError(
            f"only {len(words)} common English words are single tokens of this tokenizer",
            hint="measure with the texts of a ShareGPT file: --sharegpt FILE",
        )
    return words
