"""Parallel tool calls, with which servers differ in what tells them apart."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo.core.errors import MalformedAnswer
from dynamo.core.text import ArgumentsDelta, CallBegun, CallEnded
from dynamo.inference.openai_server.tool_calls import MAX_CALLS, CallReader


def part(name: Any = None, arguments: Any = None, **more: Any) -> dict[str, Any]:
    return {**more, "function": {"name": name, "arguments": arguments}}


def calls(*parts: dict[str, Any], cut: bool = False) -> list[tuple[str, str, bool]]:
    """Return name, arguments and whether it ended, of each call. Calls must not overlap."""
    reader, begun = CallReader(), []
    events = [event for each in parts for event in reader.feed(each)]
    for event in [*events, *(reader.cut() if cut else reader.end())]:
        if isinstance(event, CallBegun):
            begun.append([event.name, "", False])
        assert event.index == len(begun) - 1
        assert not begun[-1][2]
        if isinstance(event, ArgumentsDelta):
            begun[-1][1] += event.text
        elif isinstance(event, CallEnded):
            begun[-1][2] = True
    return [(name, arguments, ended) for name, arguments, ended in begun]


TWO = [("f", '{"a": 1}', True), ("g", '{"a": 2}', True)]
A1, A2 = '{"a": 1}', '{"a": 2}'


@pytest.mark.parametrize(
    "parts",
    [
        [part("f", A1, index=0, id="c1"), part("g", A2, index=1, id="c2")],
        [part("f", A1, index=0, id="c1"), part("g", A2, index=0, id="c2")],
        [part("f", A1, id="c1"), part("g", A2, id="c2")],
        [part("f", A1, index=None, id="c1"), part("g", A2, index=None, id="c2")],
        [part("f", A1), part("g", A2)],
        [part("f", A1, index=0, id=""), part("g", A2, index=0, id="")],
        [part("f", A1, index=0, id="same"), part("g", A2, index=1, id="same")],
        [part("f", A1, index="0"), part("g", A2, index="1")],
        [part("f", A1, index=-1), part("g", A2, index=1.5)],
        [part("f", {"a": 1}), part("g", {"a": 2})],
        # in pieces
        [
            part("f", "", index=0, id="c1"),
            part(None, A1, index=0),
            part("g", "", index=1, id="c2"),
            part(None, A2, index=1),
        ],
        [
            part("f", '{"a"', index=0, id="c1"),
            part("f", ": 1}", index=0, id="c1"),
            part("g", '{"a"', index=1, id="c2"),
            part("g", ": 2}", index=1, id="c2"),
        ],
        [part("f", '{"a"', id="c1"), part(None, ": 1}"), part("g", A2, id="c2")],
        [part("f", '{"a"', index=0), part("f", ": 1}", index=0), part("g", A2, index=0)],
        [
            part("f", '{"a"', id="x1", index=0),
            part(None, ": 1}", id="x2", index=0),
            part("g", '{"a"', id="x3", index=1),
            part(None, ": 2}", id="x4", index=1),
        ],
        [part("f", '{"a"', id="c1"), part(None, ": 1}", index=0), part("g", A2, id="c2", index=1)],
        # in turns
        [
            part("f", "", index=0, id="c1"),
            part("g", "", index=1, id="c2"),
            part(None, '{"a"', index=0),
            part(None, '{"a"', index=1),
            part(None, ": 1}", index=0),
            part(None, ": 2}", index=1),
        ],
        [
            part("f", '{"a"', id="c1"),
            part("g", '{"a"', id="c2"),
            part(None, ": 2}", id="c2"),
            part(None, ": 1}", id="c1"),
        ],
        # once more as a whole
        [
            part("f", A1, index=0, id="c1"),
            part("f", A1, index=0, id="c1"),
            part("g", A2, index=1, id="c2"),
        ],
    ],
)
def test_two_calls_stay_two(parts: list[dict[str, Any]]) -> None:
    assert calls(*parts) == TWO


def test_calls_of_one_function_without_ids_are_separated_by_complete_arguments() -> None:
    assert calls(part("f", A1, index=0), part("f", A2, index=0)) == [
        ("f", A1, True),
        ("f", A2, True),
    ]


@pytest.mark.parametrize("arguments", [None, ""])
def test_a_call_without_arguments_has_an_empty_object(arguments: str | None) -> None:
    assert calls(part("f", arguments), part("g", A2)) == [("f", "{}", True), ("g", A2, True)]


@pytest.mark.parametrize(
    "odd", [{}, {"function": None}, {"function": []}, part(None, "x"), part(7, "x"), part("", "x")]
)
def test_a_part_without_a_call_is_left_out(odd: dict[str, Any]) -> None:
    assert calls(odd, part("f", A1), part("g", A2)) == TWO


def test_calls_of_an_answer_that_was_cut_are_complete_up_to_the_last() -> None:
    parts = [part("f", '{"a"', index=0), part("g", '{"a"', index=1), part(None, ": 1}", index=0)]
    assert calls(*parts, cut=True) == [("f", A1, True), ("g", '{"a"', False)]


def test_a_call_is_passed_on_as_it_comes() -> None:
    reader = CallReader()
    assert [*reader.feed(part("f", "", id="c1"))] == [CallBegun(0, "c1", "f")]
    assert [*reader.feed(part(None, '{"a"'))] == [ArgumentsDelta(0, '{"a"')]
    assert [*reader.feed(part("g", None, id="c2"))] == []
    assert [*reader.feed(part(None, ": 1}", id="c1"))] == [
        ArgumentsDelta(0, ": 1}"),
        CallEnded(0),
        CallBegun(1, "c2", "g"),
    ]


def test_the_number_of_calls_is_bounded() -> None:
    parts = [part("f", A1, id=str(number)) for number in range(MAX_CALLS + 1)]
    assert len(calls(*parts[:-1])) == MAX_CALLS
    with pytest.raises(MalformedAnswer, match="more than 256 tool calls"):
        calls(*parts)
