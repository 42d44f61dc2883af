"""Requests and answers in text: between the HTTP surface (above) and the processor (below)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo.core.fast_path import FastPath, TextTable, TokenLog
from dynamo.core.values import FinishReason, Started


class SamplingOverrides(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the request itself says; None = the model's default (names: core.values.Sampling)."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None


class TextOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """What chat and completion requests have in common."""

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop: bool = False
    top_logprobs: int | None = None
    sampling: SamplingOverrides = SamplingOverrides()
    salt: str = ""
    priority: int = 0


class ChatRequest(msgspec.Struct, frozen=True):
    """A conversation to continue. `messages`: role and content (flattened to a string), plus
    whatever else the chat template may read."""

    model: str
    messages: tuple[dict[str, Any], ...]
    options: TextOptions = TextOptions()
    tools: tuple[dict[str, Any], ...] = ()
    template_args: dict[str, Any] = {}
    add_generation_prompt: bool = True


class CompletionRequest(msgspec.Struct, frozen=True):
    """One prompt to continue: text, or packed token ids."""

    model: str
    prompt: str | bytes
    options: TextOptions = TextOptions()
    echo: bool = False


class DecodedTokenLogprob(msgspec.Struct, frozen=True):
    """One token's logprob in text: the token's string, its bytes, and (string, bytes, logprob)
    of the best ones; `offset`: characters of the answer that were complete before it."""

    token: str
    raw: bytes
    logprob: float
    top: tuple[tuple[str, bytes, float], ...] = ()
    offset: int = 0


class TextFinish(msgspec.Struct, frozen=True):
    """The end of one choice. `reason` "stop" covers stop tokens and stop strings."""

    reason: FinishReason
    completion_tokens: int
    stop: str | int | None = None


class TextReply(ABC):
    """Where text goes. Synchronous, on the loop, never re-entrant; choices come interleaved.

    Order: `prompt` once before anything, then for every choice `begin`, `text`..., `finish`.
    """

    __slots__ = ()

    @abstractmethod
    def prompt(self, prompt_tokens: int) -> None:
        """The request was accepted and is this long."""

    @abstractmethod
    def begin(self, choice: int, started: Started) -> None:
        """A worker took the choice."""

    @abstractmethod
    def text(
        self, choice: int, delta: str, logprobs: Sequence[DecodedTokenLogprob] | None = None
    ) -> bool:
        """Non-empty text of (usually) one token. False = the reader is gone: stop everything."""

    @abstractmethod
    def finish(self, choice: int, end: TextFinish) -> None:
        """The choice is complete."""

    def open_fast_path(
        self, choice: int, text_table: TextTable, token_log: TokenLog | None
    ) -> FastPath | None:
        """Open the fast path of a choice whose text has begun (`core/fast_path.py`)."""
        del choice, text_table, token_log
        return None
