"""Replies that turn one choice into items: reasoning, text and tool calls, as they begin."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import msgspec

from dynamo.application.exchange import EventOutput, Exchange, worker_headers
from dynamo.application.generation.replies import HttpReply, TokenLogprobs
from dynamo.application.generation.token_timing import TokenTiming
from dynamo.application.openai.usage import UsageCounter
from dynamo.core.errors import ProtocolError
from dynamo.core.text import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegun,
    DecodedTokenLogprob,
    ReasoningDelta,
    RefusalDelta,
    TextFinish,
)


class AnswerItem(msgspec.Struct):
    """A part of an answer. Its deltas are reasoning, text, or the JSON text of a call's arguments.

    `complete`: nothing is missing. A call that was cut, or could not be read to its end, stays
    incomplete.
    """

    index: int
    kind: Literal["reasoning", "text", "call"]
    call_id: str = ""
    name: str = ""
    deltas: list[str] = []
    logprobs: list[DecodedTokenLogprob] = []
    complete: bool = False

    @property
    def text(self) -> str:
        """The deltas so far."""
        return "".join(self.deltas)


class ItemWriter(ABC):
    """Writes the items of one answer in the format of an API.

    Items never overlap: an item ends before the next one begins. Bytes are whole server-sent
    events; b"" writes nothing. Errors are written by `Exchange.error_format`.
    """

    @abstractmethod
    def encode_start(self, usage: UsageCounter) -> bytes:
        """Return the events before the first item. The prompt's tokens are counted already."""

    @abstractmethod
    def encode_item_begun(self, item: AnswerItem) -> bytes:
        """Return the events of an item without deltas."""

    @abstractmethod
    def encode_delta(
        self, item: AnswerItem, delta: str, logprobs: Sequence[DecodedTokenLogprob]
    ) -> bytes:
        """Return the event of a delta, which `item` has already."""

    @abstractmethod
    def encode_item_ended(self, item: AnswerItem) -> bytes:
        """Return the events of an item's end."""

    @abstractmethod
    def encode_end(
        self, items: Sequence[AnswerItem], end: TextFinish, usage: UsageCounter
    ) -> bytes:
        """Return the last events of a stream."""

    @abstractmethod
    def encode_answer(
        self, items: Sequence[AnswerItem], end: TextFinish, usage: UsageCounter
    ) -> bytes:
        """Return the JSON of a whole answer."""


class ItemReply(HttpReply):
    """Collects the `items` of one choice, and sends the whole answer when the choice has ended.
    `output`: receives the events of a stream instead of the exchange's response."""

    __slots__ = ("_calls", "_current", "_exchange", "_timing", "_writer", "items")

    def __init__(
        self,
        exchange: Exchange,
        writer: ItemWriter,
        usage_counter: UsageCounter,
        timing: TokenTiming,
        output: EventOutput | None = None,
    ) -> None:
        super().__init__(output or exchange.response, usage_counter, choices=1)
        self._exchange = exchange
        self._writer = writer
        self._timing = timing
        self.items: list[AnswerItem] = []
        self._calls = 0
        self._current: AnswerItem | None = None

    def text(self, choice: int, delta: str, logprobs: TokenLogprobs | None = None) -> bool:
        self._timing.on_text(choice)
        return self._add_delta(self._item_of_kind("text"), delta, logprobs or ())

    def event(self, choice: int, event: AnswerEvent) -> bool:
        self._timing.on_text(choice)
        if isinstance(event, ReasoningDelta):
            return self._add_delta(self._item_of_kind("reasoning"), event.text)
        if isinstance(event, RefusalDelta):
            return self._add_delta(self._item_of_kind("text"), event.text)
        if isinstance(event, CallBegun):
            item = AnswerItem(len(self.items), "call", call_id=event.id, name=event.name)
            self._begin_item(item)
            self._calls += 1
        elif isinstance(event, ArgumentsDelta):
            return self._add_delta(self._current_call(event.index), event.text)
        else:
            self._current_call(event.index).complete = True
            self._end_item()
        return self._response.open

    def restart(self, choice: int) -> bool:
        del choice
        self.items.clear()
        self._current, self._calls = None, 0
        return True

    def finish(self, choice: int, end: TextFinish) -> None:
        del choice
        self._end_item()
        self._usage_counter.on_finished(end)
        self.remaining_choices -= 1
        self._send_end(end)

    def _item_of_kind(self, kind: Literal["reasoning", "text"]) -> AnswerItem:
        """Return the current item; one of another kind ends and a new one begins."""
        item = self._current
        if item is None or item.kind != kind:
            item = AnswerItem(len(self.items), kind)
            self._begin_item(item)
        return item

    def _current_call(self, call: int) -> AnswerItem:
        item = self._current
        if item is None or item.kind != "call" or call != self._calls - 1:
            raise ProtocolError(
                f"a part of the tool call {call} came after its end",
                hint="a service must answer with one tool call after another",
            )
        return item

    def _begin_item(self, item: AnswerItem) -> None:
        self._end_item()
        self._current = item
        self.items.append(item)

    def _end_item(self) -> None:
        item, self._current = self._current, None
        if item is not None and item.kind != "call":
            item.complete = True

    def _add_delta(self, item: AnswerItem, delta: str, logprobs: TokenLogprobs = ()) -> bool:
        item.deltas.append(delta)
        if logprobs:
            item.logprobs += logprobs
            self.count_logprobs(logprobs)
        return self._response.open

    def _send_end(self, end: TextFinish) -> None:
        usage = self._usage_counter
        body = self._writer.encode_answer(self.items, end, usage)
        headers = worker_headers(usage.worker, usage.prefill_worker)
        self._exchange.send_json(200, body, headers)


class ItemStreamReply(ItemReply):
    """Writes items as events. Deltas are merged only while the client does not read.

    The response head and the writer's start are sent with the first item, or by `break_silence`.
    """

    __slots__ = ("_pending", "_pending_bytes", "_pending_logprobs")

    def __init__(
        self,
        exchange: Exchange,
        writer: ItemWriter,
        usage_counter: UsageCounter,
        timing: TokenTiming,
        output: EventOutput | None = None,
    ) -> None:
        super().__init__(exchange, writer, usage_counter, timing, output)
        self._pending: list[str] = []
        self._pending_logprobs: list[DecodedTokenLogprob] = []
        self._pending_bytes = 0
        self._response.on_silence = self.break_silence

    def restart(self, choice: int) -> bool:
        del choice
        return False

    def _start_stream(self) -> None:
        self._write(b"")

    def _begin_item(self, item: AnswerItem) -> None:
        self._write(b"")  # the start comes first: writers number their events
        super()._begin_item(item)
        self._write(self._writer.encode_item_begun(item))

    def _end_item(self) -> None:
        item = self._current
        self._flush_pending()
        super()._end_item()
        if item is not None:
            self._write(self._writer.encode_item_ended(item))

    def _add_delta(self, item: AnswerItem, delta: str, logprobs: TokenLogprobs = ()) -> bool:
        super()._add_delta(item, delta, logprobs)
        response = self._response
        if not response.congested:
            return self._write(self._writer.encode_delta(item, delta, logprobs))
        self._pending.append(delta)
        self._pending_logprobs += logprobs
        self._pending_bytes += len(delta) + 64 * len(logprobs)
        response.on_writable = self._flush_pending
        if self._pending_bytes + response.backlog_bytes > response.backlog_limit:
            response.overrun, response.open = True, False
        return response.open

    def _flush_pending(self) -> None:
        if not self._pending or self._current is None:
            return
        delta, logprobs = "".join(self._pending), self._pending_logprobs
        self._pending, self._pending_logprobs, self._pending_bytes = [], [], 0
        self._response.write(self._writer.encode_delta(self._current, delta, logprobs))

    def _write(self, events: bytes) -> bool:
        response = self._response
        if not response.started:
            usage = self._usage_counter
            self._exchange.start_stream(usage.worker, usage.prefill_worker)
            response.write(self._writer.encode_start(usage))
        if response.congested and response.backlog_bytes > response.backlog_limit:
            response.overrun, response.open = True, False
        return response.write(events) if events else response.open

    def _send_end(self, end: TextFinish) -> None:
        self._write(b"")
        if not self._response.overrun:
            self._response.end(self._writer.encode_end(self.items, end, self._usage_counter))
