"""AnswerReader: turns the text of one answer into reasoning, text and tool calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dynamo.core.text import AnswerEvent, CallEnded
from dynamo.models.answers.alphabet import MarkerAlphabet
from dynamo.models.answers.family import Family
from dynamo.models.answers.scanner import MAX_REREAD_CHARS, Scanner, Waiting, marker_set
from dynamo.models.answers.writer import AnswerWriter, MakeCallId

Events = Sequence[str | AnswerEvent]
SearchText = Callable[[str], object]


MAX_FAILED_CHARS = 1 << 16
"""Text from which no call could be read is read again, if it is short. After so many characters of
it, or more than have been written, markers of calls are only left out. The work therefore grows
with the length of an answer, and that of one piece has a bound."""
FREE_FAILED_CHARS = 1 << 10
"""Characters that are read again in any case."""


class AnswerFormat:
    """The format of a model's answers: a family's markers in the model's vocabulary.

    `search(text)` is None for text in which no marker and no call begins. `reasons`: whether the
    model reasons between the family's markers.
    """

    def __init__(self, family: Family, alphabet: MarkerAlphabet, *, reasons: bool) -> None:
        self.family = family
        self.alphabet = alphabet
        mark = alphabet.mark
        self.openings = {mark(opening) for opening, _ in family.reasoning} if reasons else set()
        self.closings = {mark(closing) for _, closing in family.reasoning} if reasons else set()
        self.reasoning_ends = {*self.closings, *map(mark, family.closed)}
        self.reasoning_bounds = {*self.reasoning_ends, *self.openings, *map(mark, family.opened)}
        self.calls = {mark(marker): read for marker, read in family.calls.items()}
        layout = {mark(marker) for marker in (*family.layout, *family.stops)}
        self.markers = tuple({*self.calls, *self.openings, *self.closings, *layout})
        texts = dict.fromkeys((*self.markers, *alphabet.literals, *family.bare_calls))
        beginnings = map(_beginning_pattern, texts)
        self.search: SearchText = re.compile("|".join((r"\n\Z", *beginnings))).search
        self._opened = tuple(
            map(str.strip, (*family.opened, *(pair[0] for pair in family.reasoning)))
        )

    def begins_in_reasoning(self, prompt_end: str) -> bool:
        """Return whether the prompt ends inside of reasoning."""
        return bool(self.openings) and prompt_end.rstrip().endswith(self._opened)


def _beginning_pattern(marker: str) -> str:
    """Return a pattern for a marker, or its beginning at the end of a text."""
    pattern = ""
    for char in reversed(marker):
        pattern = re.escape(char) + (f"(?:\\Z|{pattern})" if pattern else "")
    return pattern


class AnswerReader:
    """Reads one answer. `feed` takes its text piece by piece and returns what is certain.

    Special tokens in the text are characters of the format's alphabet. `tools`: see `AnswerWriter`.
    With `one_call`, everything behind the first call is dropped and `finished` is set.
    """

    def __init__(
        self,
        answer_format: AnswerFormat,
        tools: Mapping[str, Any],
        make_id: MakeCallId,
        *,
        prompt_end: str = "",
        one_call: bool = False,
    ) -> None:
        self.finished = False
        self._format = answer_format
        self._one_call = one_call
        self._failed_chars = 0
        self._known_to = 0  # the place up to which `_considered` holds
        self._considered = False  # calls inside of reasoning are part of it
        self._scan = Scanner(answer_format.alphabet)
        self._writer = AnswerWriter(answer_format.alphabet, tools, make_id)
        if answer_format.begins_in_reasoning(prompt_end):
            self._writer.begin_reasoning()
        if answer_format.family.first is not None:
            _, start, header = answer_format.alphabet.mark(prompt_end).rpartition(
                answer_format.alphabet.mark(answer_format.family.layout[0])
            )
            self._scan.add(header if start else "")
        self._bare = answer_format.family.bare_calls if tools else {}
        self._steps = self._read()
        next(self._steps, None)

    @property
    def idle(self) -> bool:
        """Whether text without a marker may pass by this reader."""
        return self._scan.waits_in_text and self._writer.settled and self._writer.wrote_text

    @property
    def in_reasoning(self) -> bool:
        """Whether the answer is inside of reasoning."""
        return self._writer.in_reasoning

    @property
    def calls(self) -> int:
        """The number of complete calls."""
        return self._writer.calls_ended

    def feed(self, text: str) -> Events:
        """Read a piece of the answer."""
        self._scan.add(text)
        return self._run()

    def end(self, *, cut: bool) -> Events:
        """Read what was held back. `cut`: the answer ended because it was too long."""
        self._scan.ended, self._scan.cut = True, cut
        return self._run()

    def _run(self) -> Events:
        if self.finished:
            return ()
        next(self._steps, None)
        writer = self._writer
        if self._scan.ended:
            writer.end()
        events = writer.take_events()
        self.finished = self._one_call and writer.calls_ended > 0
        return events[: _end_of_first_call(events)] if self.finished else events

    def _read(self) -> Waiting:
        scan, writer, answer_format = self._scan, self._writer, self._format
        if answer_format.family.first is not None:
            yield from answer_format.family.first(scan, writer)
        markers = marker_set(*answer_format.markers, *self._bare)
        while marker := (yield from scan.pass_until(markers, writer.text, outside=True)):
            if marker in self._bare or marker in answer_format.calls:
                if writer.in_reasoning and writer.tools and answer_format.reasoning_ends:
                    yield from self._look_ahead(len(marker))
                    if self._considered:
                        writer.leave_out()
                        continue
                yield from self._read_call(marker)
            elif marker in answer_format.closings:
                writer.end_reasoning()
            elif marker in answer_format.openings:
                writer.begin_reasoning()
            else:
                writer.leave_out()

    def _look_ahead(self, marker_chars: int) -> Waiting:
        """Find out whether the call whose marker was read is part of the reasoning around it: the
        reasoning ends behind it. A call of a model that leaves the end out is a call."""
        scan, answer_format = self._scan, self._format
        if scan.offset <= self._known_to:
            return
        scan.put_back()
        scan.begin_record()
        start, bounds = scan.offset, marker_set(*answer_format.reasoning_bounds)
        bound = yield from scan.pass_until(bounds, lambda _: None)
        self._known_to = max(scan.offset - len(bound), start + marker_chars)
        behind = scan.offset - len(bound) > start
        cut = not bound and scan.cut
        self._considered = behind and (cut or bound in answer_format.reasoning_ends)
        scan.unread()
        scan.take(marker_chars)

    def _read_call(self, marker: str) -> Waiting:
        scan, writer = self._scan, self._writer
        if self._failed_chars > min(MAX_FAILED_CHARS, FREE_FAILED_CHARS + scan.offset):
            writer.text(marker if marker in self._bare else "")
            writer.leave_out()
            return
        read = self._bare.get(marker)
        if read is not None:
            scan.put_back()
        scan.begin_record()
        if (yield from (read or self._format.calls[marker])(scan, writer)):
            writer.leave_out()
            return
        writer.abandon_call()
        if scan.ended and scan.cut:
            scan.drop_record()
            writer.drop_space()
            return
        length = scan.unread()
        if length > MAX_REREAD_CHARS:
            writer.text(scan.take_unmarked(length, marker_set(*self._format.markers)))
            return
        self._failed_chars += length
        if read is not None:
            writer.text(scan.take(len(marker)))


def _end_of_first_call(events: Events) -> int:
    ends = (number for number, event in enumerate(events, 1) if isinstance(event, CallEnded))
    return next(ends, len(events))
