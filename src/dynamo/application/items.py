"""The items of an answer: reasoning, text, refusal and tool calls, and who writes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec

from dynamo.core.errors import ProtocolError
from dynamo.core.text import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegun,
    DecodedPromptToken,
    DecodedTokenLogprob,
    ReasoningDelta,
    RefusalDelta,
    TextFinish,
    TextReply,
)
from dynamo.core.values import Started

ItemKind = Literal["reasoning", "text", "refusal", "call"]
TokenLogprobs = Sequence[DecodedTokenLogprob]
Logprobs = TokenLogprobs | None


class AnswerItem(msgspec.Struct):
    """A part of a choice. Its deltas are text, or the JSON text of a call's arguments.

    `call` counts the calls of the choice. `logprobs` is None where no delta had any. A call that
    was cut, or could not be read to its end, never is `complete`.
    `frame`: the bytes of a delta's event around its JSON string, which may repeat; () where each
    event differs.
    """

    choice: int
    index: int
    kind: ItemKind
    call: int = 0
    call_id: str = ""
    name: str = ""
    deltas: list[str] = []
    logprobs: list[DecodedTokenLogprob] | None = None
    complete: bool = True
    frame: tuple[bytes, ...] = ()

    @property
    def text(self) -> str:
        """The deltas so far."""
        return "".join(self.deltas)


class AnswerChoice(msgspec.Struct):
    """A choice of an answer. `current`: the item that has not ended. `end` counts once the choice
    has ended. `prompt`: the tokens of its prompt, where their logprobs are asked for.

    Of a stream: `begun`: it has events of the choice. `tokens`: those so far, where each event has
    the usage. `unsent` deltas of the current item, and `unsent_logprobs`, wait for a congested
    connection and take about `unsent_bytes`.
    """

    index: int
    items: list[AnswerItem] = []
    current: AnswerItem | None = None
    end: TextFinish = TextFinish("stop", 0)
    prompt: Sequence[DecodedPromptToken] | None = None
    begun: bool = False
    tokens: int = 0
    unsent: list[str] = []
    unsent_logprobs: list[DecodedTokenLogprob] = []
    unsent_bytes: int = 0


class UsageCounter(msgspec.Struct):
    """Counts the tokens of all prompts and choices. The choices of a prompt share its tokens, and
    its first choice tells the cached ones. `worker` is that of the choice that began first."""

    choices_per_prompt: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    worker: str = ""
    prefill_worker: str = ""


class ItemWriter(ABC):
    """Writes the items of one answer in the format of an API, as events of a stream or whole.

    Items of a choice never overlap: an item ends before the next one begins. Bytes are whole
    server-sent events; b"" writes nothing. Errors are written by `Exchange.error_format`. The reply
    sets `choices` and `usage`, which it updates.

    `kept_kinds`: items whose deltas are needed after they were streamed. `interleaves_calls`: a
    call may continue after a later one has begun. `shows_refusals`: refusals are items of their
    own, and no text. `holds_end`: the reply does not send its end before `send_end` is called.
    """

    kept_kinds: ClassVar[frozenset[ItemKind]] = frozenset()
    interleaves_calls: ClassVar[bool] = False
    shows_refusals: ClassVar[bool] = False
    holds_end: ClassVar[bool] = False
    choices: Sequence[AnswerChoice] = ()
    usage: UsageCounter

    def encode_start(self) -> bytes:
        """Return the events before the first item. The prompt's tokens are counted already."""
        return b""

    def encode_choice_begun(self, choice: int) -> bytes:
        """Return the events before the first item of a choice."""
        del choice
        return b""

    @abstractmethod
    def begin_item(self, item: AnswerItem) -> bytes:
        """Set the frame of an item without deltas, and return its first events."""

    def encode_delta(self, item: AnswerItem, delta: str, logprobs: TokenLogprobs) -> bytes:
        """Return the event of a delta with logprobs, or of an item without a frame."""
        del logprobs
        return msgspec.json.encode(delta).join(item.frame)

    def encode_item_ended(self, item: AnswerItem) -> bytes:
        """Return the events of an item's end."""
        del item
        return b""

    def encode_choice_ended(self, choice: AnswerChoice) -> bytes:
        """Return the events of a choice's end."""
        del choice
        return b""

    def show_usage(self, completion_tokens: int) -> None:
        """Write the usage into all further events, with the tokens so far, where they have one."""
        del completion_tokens

    @abstractmethod
    def encode_end(self) -> bytes:
        """Return the last events of a stream."""

    @abstractmethod
    def encode_answer(self) -> bytes:
        """Return the JSON of a whole answer."""


class ItemReply(TextReply):
    """Collects the text and the events of each choice as items."""

    interleaves_calls = shows_refusals = True

    def __init__(self, usage: UsageCounter, choices: int) -> None:
        self.choices = list(map(AnswerChoice, range(choices)))
        self.remaining_choices = choices
        self._usage = usage

    def prompt(self, prompt_tokens: int, repeated_bytes: int = 0) -> None:
        del repeated_bytes
        self._usage.prompt_tokens += prompt_tokens

    def begin(self, choice: int, started: Started) -> None:
        usage = self._usage
        if not usage.worker:
            usage.worker, usage.prefill_worker = started.worker, started.prefill
        if choice % usage.choices_per_prompt == 0:
            usage.cached_tokens += started.cached_tokens

    def text(self, choice: int, delta: str, logprobs: Logprobs = None) -> bool:
        answer = self.choices[choice]
        item = answer.current
        if item is None or item.kind != "text":
            item = self._begin_item(answer, AnswerItem(choice, len(answer.items), "text"))
        return self._add_delta(item, delta, logprobs)

    def event(self, choice: int, event: AnswerEvent) -> bool:
        answer = self.choices[choice]
        if isinstance(event, CallBegun):
            call = event.index, event.id, event.name
            item = AnswerItem(choice, len(answer.items), "call", *call, complete=False)
            self._begin_item(answer, item)
            return True
        if isinstance(event, ReasoningDelta | RefusalDelta):
            kind: ItemKind = "reasoning"
            if isinstance(event, RefusalDelta):
                kind = "refusal" if self.shows_refusals else "text"
            current = answer.current
            if current is None or current.kind != kind:
                current = self._begin_item(answer, AnswerItem(choice, len(answer.items), kind))
            return self._add_delta(current, event.text)
        item = self._find_call(answer, event.index)
        if isinstance(event, ArgumentsDelta):
            return self._add_delta(item, event.text)
        item.complete = True
        if item is answer.current:
            self._end_item(answer, item)
        return True

    def restart(self, choice: int) -> bool:
        self.choices[choice] = AnswerChoice(choice)
        return True

    def prompt_logprobs(self, choice: int, tokens: Sequence[DecodedPromptToken]) -> None:
        self.choices[choice].prompt = tokens

    def finish(self, choice: int, end: TextFinish) -> None:
        answer = self.choices[choice]
        answer.end = end
        if answer.current is not None:
            self._end_item(answer, answer.current)
        usage = self._usage
        usage.prompt_tokens += end.prompt_tokens
        usage.cached_tokens += end.cached_tokens
        usage.completion_tokens += end.completion_tokens
        usage.reasoning_tokens += end.reasoning_tokens
        self.remaining_choices -= 1

    def _find_call(self, answer: AnswerChoice, call: int) -> AnswerItem:
        """Return a call that can continue. Raises `ProtocolError`."""
        candidates = answer.items if self.interleaves_calls else [answer.current]
        for item in candidates:
            if item is not None and item.kind == "call" and item.call == call:
                return item
        raise ProtocolError(
            f"a part of the tool call {call} came after its end",
            hint="a service must answer with one tool call after another",
        )

    def _begin_item(self, answer: AnswerChoice, item: AnswerItem) -> AnswerItem:
        if answer.current is not None:
            self._end_item(answer, answer.current)
        answer.current = item
        answer.items.append(item)
        return item

    def _add_delta(self, item: AnswerItem, delta: str, logprobs: Logprobs = None) -> bool:
        item.deltas.append(delta)
        if logprobs is not None:
            if item.logprobs is None:
                item.logprobs = []
            item.logprobs += logprobs
        return True

    def _end_item(self, answer: AnswerChoice, item: AnswerItem) -> None:
        del item
        answer.current = None
