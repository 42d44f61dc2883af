"""The row of a family of models in the table of formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from dynamo.models.answers.call_grammar import WriteCalls
from dynamo.models.answers.scanner import Scanner, WaitingBool
from dynamo.models.answers.writer import AnswerWriter

ReadFormat = Callable[[Scanner, AnswerWriter], WaitingBool]
"""Reads what follows an opening marker. Returns False where that is not what the marker opens."""


class Family(msgspec.Struct, frozen=True):
    """How the models of a family write reasoning and tool calls.

    - `aliases`: the names of other servers for the family.
    - `reasoning`: pairs of an opening and a closing marker.
    - `calls`: readers by opening marker. `bare_calls`: readers by ordinary text with which a call
      may begin where tools are offered. Such text stays in the answer if no call follows.
    - `shared_markers`: markers of `calls` that begin other parts of answers, too.
    - `layout`: other markers, which are left out.
    - `stops`: tokens that end an answer.
    - `templates`: texts of which one occurs in the chat templates of the family.
    - `opened`: ends of prompts behind which reasoning has begun, besides the opening markers.
    - `closed`: texts that end reasoning, besides the closing markers.
    - `id_pattern`: ids of calls that the model writes and that are kept. `id_chars`: the length of
      new ids; 0: they are `call_` and random characters.
    - `answer_start`: what stands before text where `first` reads headers.
    - `write_calls`: the layout of calls in grammars that force them.
    - `first`: how the answer begins, from the end of the prompt; None: by its opening markers.
    """

    name: str
    aliases: tuple[str, ...] = ()
    reasoning: tuple[tuple[str, str], ...] = ()
    calls: Mapping[str, ReadFormat] = {}
    bare_calls: Mapping[str, ReadFormat] = {}
    shared_markers: tuple[str, ...] = ()
    layout: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()
    id_pattern: str = ""
    id_chars: int = 0
    first: ReadFormat | None = None
    answer_start: str = ""
    write_calls: WriteCalls | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers that never are part of a text."""
        pairs = [marker for pair in self.reasoning for marker in pair]
        return tuple(dict.fromkeys((*self.calls, *pairs, *self.layout, *self.stops)))
