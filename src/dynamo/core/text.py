"""Requests and answers in text, between the HTTP server and the processor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from dynamo.core.fast_path import FastPath, TextTable, TokenLog
from dynamo.core.values import FinishReason, Started, StructuredOutput


class SamplingOverrides(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling values of a request (see `SamplingParams`). None = the model's default."""

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
    """Options that chat and completion requests share. `count_tokens`: the reply wants to know the
    tokens of each choice as they come. `structured_field`: where the request has `structured`.
    `adapter`: the id of a LoRA adapter, "" for none. `caller`: a digest of the caller's API key,
    where there are several."""

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    count_tokens: bool = False
    sampling: SamplingOverrides = SamplingOverrides()
    salt: str = ""
    priority: int = 0
    structured: StructuredOutput | None = None
    structured_field: str = ""
    adapter: str = ""
    caller: str = ""


CallMode = Literal["free", "strict", "required", "named"]


class ChatRequest(msgspec.Struct, frozen=True):
    """A conversation to continue. `messages` have a role, a content (a string, a list of text
    parts, or None beside calls), and any further field that the chat template may read. Arguments
    of their tool calls are JSON text, as the client sent it.

    `callable_tools`: the names of `tools` that the answer may call; None: all of them. `call_mode`:
    "free", "strict" (calls have arguments by the schemas), "required" (the answer consists of such
    calls), or "named" (of one call). `continue_final`: the answer continues the last message.
    """

    model: str
    messages: tuple[dict[str, Any], ...]
    options: TextOptions = TextOptions()
    tools: tuple[dict[str, Any], ...] = ()
    callable_tools: tuple[str, ...] | None = None
    call_mode: CallMode = "free"
    parallel_tool_calls: bool = True
    template_args: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final: bool = False

    def tool_options(self) -> dict[str, Any]:
        """Return OpenAI's fields besides `tools` that say which calls an answer may have."""
        names, required = self.callable_tools, self.call_mode in {"required", "named"}
        options: dict[str, Any] = {} if self.parallel_tool_calls else {"parallel_tool_calls": False}
        if names is None:
            return options | ({"tool_choice": "required"} if required else {})
        if not names:
            return options | {"tool_choice": "none"}
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        if self.call_mode == "named":
            return options | {"tool_choice": tools[0]}
        allowed = {"mode": "required" if required else "auto", "tools": tools}
        return options | {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}


class CompletionRequest(msgspec.Struct, frozen=True):
    """A prompt to continue, as text or packed token ids."""

    model: str
    prompt: str | bytes
    options: TextOptions = TextOptions()
    echo: bool = False


class DecodedTokenLogprob(msgspec.Struct, frozen=True):
    """The logprob of one token, with its string and bytes.

    `top` holds (string, bytes, logprob) of the best tokens. `offset` counts the characters of the
    answer that were complete before this token.
    """

    token: str
    raw: bytes
    logprob: float
    top: tuple[tuple[str, bytes, float], ...] = ()
    offset: int = 0


REPLACEMENT = "\ufffd"
"""Stands for bytes that are no character. At the end of a cut answer, for half of one."""
MAX_CUT_BYTES = 3
"""A character in UTF-8 has at most one byte more."""


def split_cut_character(text: str) -> tuple[str, str]:
    """Return a text without the U+FFFD at its end that may be a cut character, and these."""
    tail = text[-MAX_CUT_BYTES:]
    end = len(text) - len(tail) + len(tail.rstrip(REPLACEMENT))
    return text[:end], text[end:]


class TextDelta(msgspec.Struct, frozen=True, tag="text"):
    """Text of an answer, with the logprobs of its tokens if the request asks for them."""

    text: str
    logprobs: tuple[DecodedTokenLogprob, ...] | None = None


class DecodedPromptToken(msgspec.Struct, frozen=True):
    """A token of a prompt, with its string and bytes. `offset` counts the characters before it.

    `logprob` is None for the first token. `rank` is 1 for the most probable one. `top` holds (id,
    string, bytes, logprob) of the best tokens.
    """

    token_id: int
    token: str
    raw: bytes
    offset: int
    logprob: float | None = None
    rank: int = 0
    top: tuple[tuple[int, str, bytes, float], ...] = ()


class ReasoningDelta(msgspec.Struct, frozen=True, tag="reasoning"):
    """Non-empty text of the model's reasoning."""

    text: str


class RefusalDelta(msgspec.Struct, frozen=True, tag="refusal"):
    """Non-empty text by which a model refuses to answer, where its server tells it apart."""

    text: str


class CallBegun(msgspec.Struct, frozen=True, tag="call"):
    """A tool call whose name is complete. `index` counts the calls of the choice."""

    index: int
    id: str
    name: str


class ArgumentsDelta(msgspec.Struct, frozen=True, tag="arguments"):
    """Non-empty JSON text of a call's arguments."""

    index: int
    text: str


class CallEnded(msgspec.Struct, frozen=True, tag="call_end"):
    """The call is complete. A call without this event was cut or could not be read to its end."""

    index: int


AnswerEvent = ReasoningDelta | RefusalDelta | CallBegun | ArgumentsDelta | CallEnded
"""The parts of a parsed answer besides its text."""
TextPart = TextDelta | AnswerEvent
"""A part of an answer that an engine gives as text."""


class TextFinish(msgspec.Struct, frozen=True):
    """The end of one choice. Reason "stop" covers the stop token or stop string in `stop`. An
    answer with complete tool calls ends by "tool_calls" instead.

    `prompt_tokens`, `cached_tokens`: what `TextReply.prompt` and `begin` did not know, reported by
    the first choice of a prompt.
    """

    reason: FinishReason | Literal["tool_calls"]
    completion_tokens: int
    stop: str | int | None = None
    reasoning_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class TextReply(ABC):
    """Receives the text of one request. Methods are called on the loop and never re-entrantly.

    Order: `prompt` once, then for each choice `begin`, `text` and `event` any number of times,
    `finish`. Calls of several choices are interleaved.
    """

    __slots__ = ()

    @abstractmethod
    def prompt(self, prompt_tokens: int, repeated_bytes: int = 0) -> None:
        """The request was accepted and has this many prompt tokens.

        `repeated_bytes`: text of the prompt that every choice after the first repeats. Raises
        `TooLarge` beyond the budget of the request.
        """

    @abstractmethod
    def begin(self, choice: int, started: Started) -> None:
        """A worker began the choice."""

    @abstractmethod
    def text(
        self, choice: int, delta: str, logprobs: Sequence[DecodedTokenLogprob] | None = None
    ) -> bool:
        """Take text, usually of one token. Empty text has the logprobs of tokens that the answer's
        end cuts inside a character. False = the reader is gone: stop."""

    def event(self, choice: int, event: AnswerEvent) -> bool:
        """Take reasoning or a part of a tool call; replies that only show text ignore them. Returns
        as `text`."""
        del choice, event
        return True

    def restart(self, choice: int) -> bool:
        """Forget text and events of the choice, which begins again. False: the reader has them."""
        del choice
        return False

    @abstractmethod
    def finish(self, choice: int, end: TextFinish) -> None:
        """The choice is complete."""

    def count_tokens(self, choice: int, tokens: int) -> None:
        """Take the number of tokens whose text may follow. Only requests with
        `TextOptions.count_tokens` tell it."""
        del choice, tokens

    def prompt_logprobs(self, choice: int, tokens: Sequence[DecodedPromptToken]) -> None:
        """Take the tokens of the prompt with their logprobs, before the choice ends. Only requests
        with `TextOptions.prompt_logprobs` have them."""
        del choice, tokens

    def open_fast_path(
        self, choice: int, text_table: TextTable, token_log: TokenLog | None
    ) -> FastPath | None:
        """Open the fast path of a choice whose text has begun (`core/fast_path.py`)."""
        del choice, text_table, token_log
        return None
