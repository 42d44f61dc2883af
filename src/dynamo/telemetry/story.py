"""The story of a request: what its stages note while it passes.

The handler of a route opens a story and passes it to a listener at the request's end. Stages in
between find it by `current_story`, and append what they know already. Listeners read a story off
the event loop, so that a stage never formats anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import msgspec


class Story(msgspec.Struct):
    """The facts of an HTTP request that generates text. Times with `_s` are seconds of the
    process's clock, `wall_s` is the arrival since 1970.

    `headers` are the client's. `attempts` are the ledger's entries in the order in which they were
    made, one for each attempt of each choice. Token counts are sums over `prompts` and their
    `choices`. `end` is "" for a whole answer, else an error code or "cancelled".
    """

    request_id: str
    model: str
    wall_s: float
    began_s: float
    headers: Mapping[bytes, bytes]
    priority: int
    choices: int
    prompts: int
    attempts: list[Any] = []
    ended_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    end: str = ""


StoryListener = Callable[[Story], None]
"""Receives each story at its end. Runs on the event loop and must be short."""

current_story: ContextVar[Story | None] = ContextVar("current_story", default=None)
"""The story of the request that the current task handles; None where no story is recorded."""
