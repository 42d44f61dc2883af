"""The tool calls of another server's answer: which parts belong together, and in which order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from dynamo.core.errors import DECODE_ERRORS, MalformedAnswer
from dynamo.core.text import AnswerEvent, ArgumentsDelta, CallBegun, CallEnded
from dynamo.inference.openai_server.foreign_values import read_index, read_object, read_word

MAX_CALLS = 256
"""Most tool calls of an answer."""
MAX_PARSES = 64
"""The arguments of a call are parsed so many times at most, to learn whether they are complete."""


class ForeignCall(msgspec.Struct, eq=False):
    """A tool call. `sent`: how many of the arguments' pieces have been passed on."""

    number: int
    index: int | None
    id: str
    name: str
    pieces: list[str] = []
    sent: int = 0
    parses: int = 0

    def is_complete(self) -> bool:
        """Whether the arguments are a JSON value, so that nothing can follow."""
        if not self.pieces or self.pieces[-1].rstrip()[-1:] not in {"}", "]"}:
            return False
        self.parses += 1
        if self.parses > MAX_PARSES:
            return False
        try:
            msgspec.json.decode("".join(self.pieces), type=msgspec.Raw)
        except DECODE_ERRORS:
            return False
        return True


class CallReader:
    """Puts the parts of calls together and passes them on one call after another.

    Servers number parallel calls, give all of them the same index, or none. The parts of one call
    may have its id and name, new ids, or neither. Parts of later calls are kept until the calls
    before are complete.
    """

    def __init__(self) -> None:
        self._calls: list[ForeignCall] = []
        self._open = 0
        """The number of the call that is passed on as it comes, behind which all are kept."""
        self._begun = 0

    @property
    def are_open(self) -> bool:
        """Whether a call has not ended."""
        return self._open < len(self._calls)

    def feed(self, part: Mapping[str, Any]) -> Iterator[AnswerEvent]:
        """Yield the events that a part of a call allows. Raises `MalformedAnswer`."""
        function = read_object(part.get("function") or part.get("custom"))
        name = read_word(function.get("name"))
        arguments = _arguments(function)
        call_id, index = read_word(part.get("id")), read_index(part.get("index"))
        call = self._find(index, call_id, name)
        if call is not None and name and self._begins_another(call, call_id, name, arguments):
            call = None
        elif call is not None and name and call.is_complete():
            return  # the whole call once more
        if call is None:
            if not name:
                return
            if len(self._calls) == MAX_CALLS:
                raise MalformedAnswer(f"the server's answer has more than {MAX_CALLS} tool calls")
            call = ForeignCall(len(self._calls), index, call_id, name)
            self._calls.append(call)
        if call.number < self._open:
            return  # the call has ended
        if arguments:
            call.pieces.append(arguments)
        yield from self._advance()

    def end(self) -> Iterator[AnswerEvent]:
        """Yield the rest of all calls and their ends."""
        while self._open < len(self._calls):
            yield from self._end_open()

    def cut(self) -> Iterator[AnswerEvent]:
        """Yield what is kept of an answer that was cut. Its last call does not end."""
        while self._open < len(self._calls) - 1:
            yield from self._end_open()
        yield from self._send_open()

    def _find(self, index: int | None, call_id: str, name: str) -> ForeignCall | None:
        """Return the call that a part may belong to."""
        calls = self._calls
        for call in reversed(calls):
            if (
                call_id
                and call.id == call_id
                and (index is None or call.index is None or call.index == index)
            ):
                return call
        if index is not None:
            same = next((call for call in reversed(calls) if call.index == index), None)
            if same is not None or name:
                return same
        return calls[-1] if calls else None

    def _begins_another(self, call: ForeignCall, call_id: str, name: str, arguments: str) -> bool:
        """Whether a part with a name is the first of another call than the one it may belong to."""
        if name != call.name:
            return True
        if call_id or call.id:
            return bool(call_id and call.id) and call_id != call.id
        return bool(arguments) and call.is_complete()

    def _advance(self) -> Iterator[AnswerEvent]:
        """Yield what may be passed on: a call ends where it is complete and another has begun."""
        while self._open < len(self._calls) - 1 and self._calls[self._open].is_complete():
            yield from self._end_open()
        yield from self._send_open()

    def _send_open(self) -> Iterator[AnswerEvent]:
        if self._open == len(self._calls):
            return
        call = self._calls[self._open]
        if self._begun == call.number:
            self._begun += 1
            yield CallBegun(call.number, call.id or f"call_{call.number}", call.name)
        if call.sent < len(call.pieces):
            text = "".join(call.pieces[call.sent :])
            call.sent = len(call.pieces)
            yield ArgumentsDelta(call.number, text)

    def _end_open(self) -> Iterator[AnswerEvent]:
        yield from self._send_open()
        call = self._calls[self._open]
        if not call.pieces:
            yield ArgumentsDelta(call.number, "{}")
        self._open += 1
        yield CallEnded(call.number)


def _arguments(function: Mapping[str, Any]) -> str:
    value = next((function[name] for name in ("arguments", "input") if name in function), None)
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)
