"""What is to be measured, as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class RequestPlan(msgspec.Struct, frozen=True):
    """One request. Its prompt is `text`; else blocks of words fixed by `hash_ids`; else fresh
    words. `delay_s` passes after the turn before; `answer` stands in the conversation for what the
    server said."""

    input_tokens: int
    output_tokens: int
    delay_s: float = 0.0
    hash_ids: Sequence[int | str] = ()
    text: str = ""
    answer: str = ""


class SessionPlan(msgspec.Struct, frozen=True):
    """Turns one after the other. `start_s`: when the first is due, from the run's begin; None: as
    soon as there is a place. `history`: every turn's prompt holds the turns before it."""

    turns: Sequence[RequestPlan]
    start_s: float | None = None
    history: bool = False


class BenchTarget(msgspec.Struct, frozen=True):
    """The server, and what every request says. `extra` is merged into each body."""

    url: str = "http://127.0.0.1:8000"
    model: str = "default"
    api_key: str = ""
    completions: bool = False
    ignore_eos: bool = True
    timeout_s: float = 0.0
    extra: Mapping[str, Any] = {}


class RequestShape(msgspec.Struct, frozen=True):
    """Prompts and answers of made-up requests. `prefix_share` of each prompt is one of `prefixes`
    shared beginnings; `turns` over 1: conversations."""

    input_tokens: int = 128
    output_tokens: int = 64
    prefix_share: float = 0.0
    prefixes: int = 1
    turns: int = 1


class LoadProfile(msgspec.Struct, frozen=True):
    """How requests come. `rate` requests a second, growing evenly to `rate_to`, else `concurrency`
    at a time; until `duration_s` have passed or `requests` were sent (0: no limit). `seed` 0: other
    prompts in every run, so that no cache knows them from the run before."""

    concurrency: int = 1
    rate: float = 0.0
    rate_to: float = 0.0
    even: bool = False
    duration_s: float = 10.0
    requests: int = 0
    warmup: int = 0
    seed: int = 0


class LatencyObjectives(msgspec.Struct, frozen=True):
    """A request is good whose first token and whose mean gap between texts are in time; 0: any."""

    ttft_ms: float = 0.0
    itl_ms: float = 0.0

    @property
    def any_set(self) -> bool:
        """Is there any?"""
        return bool(self.ttft_ms or self.itl_ms)
