"""AnswerWriter: collects the events of one answer and keeps its rules about text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any, cast

from dynamo.core.text import AnswerEvent, ArgumentsDelta, CallBegun, CallEnded, ReasoningDelta
from dynamo.models.answers.alphabet import MarkerAlphabet, escape_surrogates, split_at_marks

MakeCallId = Callable[[str], str]
"""Returns the id of a call from the id that the model wrote, or from ""."""


class AnswerWriter:
    """Receives what a reader recognised.

    - Newlines between text and a call, and around reasoning, are layout and are left out.
    - White space between calls is layout. Text behind a call is passed on as it is.
    - A call begins with its first argument text. Its last brace waits for the end of the call.
    - No marker is formed out of text before and text behind something that was left out.

    `tools` maps the names of offered tools to the JSON schemas of their parameters.
    """

    def __init__(
        self, alphabet: MarkerAlphabet, tools: Mapping[str, Any], make_id: MakeCallId
    ) -> None:
        self.events: list[str | AnswerEvent] = []
        self.tools = tools
        self.in_reasoning = False
        self.calls_begun = self.calls_ended = 0
        self.wrote_text = False
        self.literal = alphabet.literal
        self._alphabet = alphabet
        self._make_id = make_id
        self._space: list[str] = []  # white space that may be layout
        self._after_call = False
        self._at_start = False  # newlines behind reasoning are layout
        self._tail = ""  # the last text before something that was left out
        self._joining = ""  # text that may be the rest of a marker
        self._last = self._other_last = ""  # ends of this text and of the one beside reasoning
        self._call: tuple[str, str] | None = None
        self._begun = False
        self._held: list[str] = []  # argument text that is not certain

    @property
    def settled(self) -> bool:
        """Whether text may pass by this writer."""
        return not (
            self.in_reasoning
            or self._space
            or self._after_call
            or self._at_start
            or self._may_join()
        )

    def take_events(self) -> list[str | AnswerEvent]:
        """Return the events since the last call. Texts without an event between them are one."""
        events, self.events = self.events, []
        if len(events) < 2:
            return events
        merged: list[str | AnswerEvent] = []
        for kind, group in groupby(events, type):
            run = list(group)
            merged += ("".join(cast("list[str]", run)),) if kind is str else run
        return merged

    def text(self, text: str) -> None:
        """Write text or reasoning, without special tokens."""
        visible, *others = split_at_marks(text)
        self._write_visible(visible)
        for visible in others:
            self.leave_out()
            self._write_visible(visible)

    def _write_visible(self, visible: str) -> None:
        if self._tail:
            visible = self._separate(visible)
        if self._at_start:
            visible = visible.lstrip("\n")
            self._at_start = not visible
        if not visible:
            return
        if self._after_call and visible.isspace():
            self._space.append(visible)
            return
        self._after_call = False
        body = visible.rstrip("\n")
        if body:
            self._flush_space(body)
        if len(body) < len(visible):
            self._space.append(visible[len(body) :])

    def begin_reasoning(self) -> None:
        """Begin reasoning."""
        if not self.in_reasoning:
            self._switch(reasoning=True)
            self._space, self._at_start = [], True
        self.leave_out()

    def end_reasoning(self) -> None:
        """End reasoning; text follows."""
        if self.in_reasoning:
            self._switch(reasoning=False)
            self._space, self._at_start = [], True
        self.leave_out()

    def leave_out(self) -> None:
        """Note that something between two texts is left out."""
        self._tail = self._last if self._may_join() else ""

    def drop_space(self) -> None:
        """Leave out the newlines before a call that was cut."""
        self._space.clear()

    def end(self) -> None:
        """Write what was held back at the end of the answer."""
        joining, self._joining, self._tail = self._joining, "", ""
        if joining:
            self.text(joining)
        if not (self.in_reasoning or self._after_call):
            self._flush_space()

    def open_call(self, name: str, call_id: str = "") -> None:
        """A call to an offered tool follows."""
        self._call, self._begun, self._held = (name, call_id), False, []

    def arguments(self, text: str) -> None:
        """Write JSON text of the arguments."""
        held = self._held
        held.append(text)
        if not text or text.isspace():
            return
        text = "".join(held)
        stripped = text.rstrip()
        if stripped in ("{", "{}"):
            held[:] = (text,)
            return
        certain = stripped[:-1] if stripped.endswith("}") else text
        held[:] = (text[len(certain) :],)
        if certain:
            self._write_arguments(certain)

    def string_arguments(self, text: str) -> None:
        """Write text inside of a JSON string of the arguments."""
        if text:
            self.arguments(json_string(self.literal(text))[1:-1])

    def close_call(self) -> None:
        """The call is complete."""
        self._write_arguments("".join(self._held).strip() or "{}")
        self.events.append(CallEnded(self.calls_begun - 1))
        self._call = None
        self.calls_ended += 1
        self.leave_out()

    def abandon_call(self) -> None:
        """The call cannot be read. Its argument text so far stays."""
        self._call = None
        self.leave_out()

    def is_clean(self, name: str) -> bool:
        """Return whether a name contains no special token and no marker."""
        return len(split_at_marks(name)) == 1 and self._alphabet.letters.search(name) is None

    def _write_arguments(self, text: str) -> None:
        if not self._begun and self._call is not None:
            name, call_id = self._call
            self._begun, self._after_call, self._space = True, True, []
            self._switch(reasoning=False)
            self._at_start = False
            self.events.append(CallBegun(self.calls_begun, self._make_id(call_id), name))
            self.calls_begun += 1
        text = escape_surrogates(text)
        self.events.append(ArgumentsDelta(self.calls_begun - 1, text))

    def _switch(self, *, reasoning: bool) -> None:
        """Continue in reasoning or in the text, behind what was written there before."""
        if self.in_reasoning != reasoning:
            self.in_reasoning = reasoning
            self._last, self._other_last = self._other_last, self._last

    def _write(self, text: str) -> None:
        self._last = (self._last + text)[-self._alphabet.letters.longest :]
        if self.in_reasoning:
            self.events.append(ReasoningDelta(text))
            return
        self.wrote_text = True
        self.events.append(text)

    def _flush_space(self, body: str = "") -> None:
        """Write the white space that is no layout, and the text behind it."""
        text = "".join((*self._space, body))
        self._space.clear()
        if text:
            self._write(text)

    def _may_join(self) -> bool:
        """Return whether the last text ends like the beginning of a marker."""
        return self._alphabet.letters.partial(self._last) < len(self._last)

    def _separate(self, text: str) -> str:
        """Leave out the rest of a marker whose beginning stands before something left out."""
        longest = self._alphabet.letters.longest
        space = "".join(piece[-longest:] for piece in self._space[-longest:])
        rests = self._alphabet.rests_behind(self._tail + space)
        text, self._joining, position = self._joining + text, "", 0
        while position < len(text):
            lengths = [len(rest) for rest in rests if text.startswith(rest, position)]
            if not lengths:
                break
            position += min(lengths)
        text = text[position:]
        if any(rest.startswith(text) for rest in rests):
            self._joining = text
            return ""
        self._tail = ""
        return text


def json_string(text: str) -> str:
    """Return a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)
