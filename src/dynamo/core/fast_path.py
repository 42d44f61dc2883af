"""The token fast path: one call takes a token from the wire's reader to the HTTP connection.

A token normally passes every reply that follows its request, because each of them may act on it::

    frame ─▶ ReplyDecoder ─▶ Attempt ─▶ ResumableReply ─▶ Detokeniser ─▶ StreamReply ─▶ Response
               │             counts      keeps the ids     text, stops    SSE event      bytes
               │                            │                                  ▲
               └────────── SendToken ───────┼──────────────────────────────────┘
                     one call a token       └─ token log: array of every id that was passed on

These classes are in `core/codec.py`, `scheduling/router/attempt.py`, `scheduling/migration.py`,
`scheduling/processor/detokeniser.py`, `application/generation/replies.py` and
`communication/http/response.py`. For most tokens they have nothing to do. After
`FAST_PATH_AFTER_PAYLOADS` payloads of tokens the decoder therefore requests a `SendToken` once:

1. `Reply.open_fast_path(token_log)` travels from the decoder to the detokeniser. A reply that only
   passes tokens on forwards the call. `ResumableReply`, which must remember the ids for a
   migration, passes its own token log. A reply that has to see every token answers None.
2. The detokeniser calls `TextReply.open_fast_path(choice, text_table, token_log)` with the table of
   the vocabulary's texts.
3. The stream's reply answers with a `FastPath`. Its method `send_token` is the `SendToken`.

`send_token` takes a token only under these conditions:

- the detokeniser holds no text back (`FastPath.buffer_empty`),
- the id alone is a whole text that cannot begin a stop string,
- the connection takes bytes.

The token is then appended to the token log and written. Otherwise the answer is None and the
decoder sends the token through `Reply.tokens`, so every rule is written once. Replies that count
tokens read the length of the token log or `FastPath.tokens_sent`.

A reply without a fast path costs nothing: the defaults answer None.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from functools import cached_property
from typing import TypeAlias

import msgspec

FAST_PATH_AFTER_PAYLOADS = 2
"""The decoder opens the fast path after this many payloads of tokens."""

SendToken = Callable[[int], bool | None]
"""Sends one token id. True: sent. False: the reader has enough. None: not taken, use `tokens`."""

TokenLog: TypeAlias = "array[int]"
"""Every token id of one answer in order, `array("I")`. Its owner is the reply that returns it."""


class FastPath(ABC):
    """Sends single tokens of one choice straight to their reader.

    The detokeniser sets `buffer_empty` to False while it holds text back. `tokens_sent` counts the
    tokens that were taken.
    """

    __slots__ = ("buffer_empty", "tokens_sent")

    def __init__(self) -> None:
        self.tokens_sent = 0
        self.buffer_empty = True

    @abstractmethod
    def send_token(self, token: int) -> bool | None:
        """Send one token id. See `SendToken` for the answers."""


class TokenTexts:
    """The texts of a vocabulary's tokens, which all its requests share.

    `texts[id]` is the text of a token id, or None where the id alone is not a whole text.
    """

    def __init__(self, texts: list[str | None]) -> None:
        self.texts = texts

    @cached_property
    def json_texts(self) -> list[bytes | None]:
        """The JSON strings of `texts`, None where no fast path has encoded them yet."""
        return [None] * len(self.texts)


class TextTable(msgspec.Struct, frozen=True):
    """The texts that a fast path may send.

    A text for which `may_begin_stop` is true is not taken. None: the request has no stop strings.
    """

    token_texts: TokenTexts
    may_begin_stop: Callable[[str], object] | None = None
