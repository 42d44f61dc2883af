"""The work of readers of answers grows with the text that they read, whatever that text is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from cProfile import Profile
from types import GeneratorType
from typing import Any

import pytest

from dynamo.models.answers.families import FAMILIES, find_family, make_format
from dynamo.models.answers.family import Family
from dynamo.models.answers.json_scanner import JsonScanner
from dynamo.models.answers.reader import AnswerReader
from dynamo.models.answers.scanner import MAX_NAME_CHARS, MAX_REREAD_CHARS, Scanner
from dynamo.models.answers.values import TaggedArguments, value_types
from dynamo.models.answers.writer import AnswerWriter

PIECES = 8
PIECE_CHARS = 32
LEAST_CALLS = 8 * PIECES * PIECE_CHARS
MOST_CHARS = MAX_NAME_CHARS + 2 * PIECE_CHARS
GROWTH = 2.6
"""Twice the calls for twice the text, and some more for limits. Squared work gives four."""
PARAMETERS = {"s": {"type": "string"}, "l": {"type": "array"}, "u": {}}
TOOLS = {"f": {"type": "object", "properties": PARAMETERS}}
ONLY = '{"name": "f", "arguments": '
OPENINGS = {
    "qwen3-xml": (
        *("<tool_call>", "<tool_call>\n<function=", "<tool_call>\n<function=f>"),
        *(f"<function=f>\n<parameter={key}>" for key in PARAMETERS),
        *("<function=f>\n<parameter=s>x</parameter>", "<function=f>\n<parameter=l>['a', "),
    ),
    "glm": (
        *("<tool_call>f", "<tool_call>f\n<arg_key>", "<tool_call>f\n<arg_key>s</arg_key>"),
        *(f"<tool_call>f<arg_key>{key}</arg_key><arg_value>" for key in PARAMETERS),
        "<tool_call>f<arg_key>s</arg_key><arg_value>x</arg_value>",
    ),
    "kimi": (
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|open|>", "<|close|>"),
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>",
        '<|open|>call tool="f"<|sep|>',
        '<|open|>call tool="f"<|sep|><|open|>argument key="u"<|sep|>',
    ),
    "deepseek": (
        *("<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>"),
        *('<｜DSML｜invoke name="', '<｜DSML｜invoke name="f">'),
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="u">',
    ),
    "gpt-oss": (
        *("<|channel|>", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
        "<|channel|>commentary to=functions.f<|message|>",
    ),
    "gemma4": (
        *("<|channel>", "<|tool_call>", "<|tool_call>call:f{", "<|tool_call>call:f{s:"),
        *('<|tool_call>call:f{s:<|"|>', "<|tool_call>call:f{l:[1"),
    ),
    "mistral": (
        *("[THINK]", "[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[CALL_ID]"),
        *("[TOOL_CALLS][", "[TOOL_CALLS][" + ONLY + "{}}"),
    ),
    "llama": ("[", "[f(", "[f(s=", "[f(s='", '[f(s="', "[f(l=[", ONLY + "{}}", ONLY + "{}};"),
    "qwen3-hermes": ("<think>", "<tool_call>", "<tool_call>" + ONLY + "{}}</tool_call>"),
}
"""Beginnings of answers, by family."""
CALLS = {
    "kimi": "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>",
    "deepseek": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>",
    "gpt-oss": "<|channel|>commentary to=functions.f<|message|>",
    "mistral": "[TOOL_CALLS]f[ARGS]",
    "llama": ONLY,
    "qwen3-hermes": "<tool_call>" + ONLY,
}
"""The text before the arguments of a call in JSON, by family."""
ARGUMENTS = ("{", '{"s": ', '{"s": "', '{"s": 1', '{"s": "x"', '{"s": "x"}', '{"', "[", '"{')


UNITS = (
    *("\n", " ", "x", "1", '"', "'", "\\", "\x01", "<", "{", "}", "[", "(", ",", "=", '\\"'),
    *("{}", "1,", ": ", "a=1, ", ' "k": 1,', '{"x": 1} ', ONLY, ' a="', "\n<", "> \n"),
)
"""Texts that hostile answers repeat."""


def held_chars(reader: AnswerReader) -> int:
    """Return the length of the strings that a reader, its parts and its waiting functions keep. Text
    in lists is not looked at before it is complete."""
    known, pending, chars = set[int](), list[Any]((reader,)), 0
    while pending:
        value = pending.pop()
        if id(value) in known:
            continue
        known.add(id(value))
        if isinstance(value, str):
            chars += len(value)
        elif isinstance(value, Scanner):
            chars += len(value.text) - value.position
        elif isinstance(value, GeneratorType) and value.gi_frame is not None:
            pending += (*value.gi_frame.f_locals.values(), value.gi_yieldfrom)
        elif isinstance(value, (AnswerReader, AnswerWriter, JsonScanner, TaggedArguments)):
            pending += vars(value).values()
    return chars


def measure(
    family: Family, opening: str, pieces: Sequence[str], tools: Mapping[str, Any] = TOOLS
) -> tuple[int, int]:
    """Return how many functions were called to read pieces, and how many characters were kept in
    strings both before and behind the last piece."""
    reader = AnswerReader(make_format(family, "", (), named=True), tools, str)
    reader.feed(opening)
    with Profile(subcalls=False) as profile:
        for piece in pieces[:-1]:
            reader.feed(piece)
        profile.disable()
        held = held_chars(reader)
        profile.enable()
        reader.feed(pieces[-1])
        profile.disable()
        held = min(held, held_chars(reader))
        profile.enable()
        reader.end(cut=False)
    return sum(entry.callcount for entry in profile.getstats()), held


def grows_too_fast(work: Sequence[tuple[int, int]]) -> bool:
    """Return whether the calls for one, two and four parts of a text grow faster than the text, or
    whether strings grow, which are copied or searched with each piece."""
    (single, least), (double, _), (fourfold, most) = work
    too_many = fourfold - double > GROWTH * max(double - single, LEAST_CALLS)
    return too_many or most - least > MOST_CHARS


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_work_grows_with_the_text(name: str) -> None:
    family, call = find_family(name), CALLS.get(name)
    openings = ["x", *OPENINGS[name], *((call + text for text in ARGUMENTS) if call else ())]
    cases = [(opening, unit) for opening in openings for unit in UNITS]
    for marker in family.markers:
        cases += ((openings[-1], part) for part in (marker, marker[:-1], marker[:-1] + " "))
    slow = []
    for opening, unit in cases:
        piece = unit * -(-PIECE_CHARS // len(unit))
        work = [measure(family, opening, [piece] * PIECES * k) for k in (1, 2, 4)]
        if grows_too_fast(work):
            slow.append((opening, unit, work))
    assert slow == []


class CountedName(str):
    """A name of a parameter that counts its comparisons."""

    __slots__ = ()
    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedName.comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_work_grows_with_the_number_of_parameters() -> None:
    keys = [CountedName(f"k{number}") for number in range(200)]
    schema = {"type": "object", "properties": {key: {"type": "string"} for key in keys}}
    values = [f"<parameter={key}>\n1\n</parameter>\n" for key in map(str, keys)]
    CountedName.comparisons = 0
    measure(find_family("qwen3-xml"), "<function=f>", [*values, "</function>"], {"f": schema})
    assert CountedName.comparisons < 20 * len(keys)


def test_a_long_list_of_allowed_values_is_read_in_part() -> None:
    with Profile(subcalls=False) as profile:
        types = value_types({"properties": {"a": {"enum": ["x"] * 100_000}}}, "a")
    assert types == {"string"}
    assert sum(entry.callcount for entry in profile.getstats()) < 2000


async def test_a_long_call_without_an_end_is_text_without_markers() -> None:
    opening, markers = "<tool_call>" + ONLY + '{"s": "', "<think></think><|im_end|><tool_call>"
    text = opening + markers * (MAX_REREAD_CHARS // len(markers) + 1) + '" !'
    reader = AnswerReader(make_format(find_family("qwen3-hermes"), "", (), named=True), TOOLS, str)
    events = [*reader.feed(text), *reader.end(cut=False)]
    written = "".join(event for event in events if isinstance(event, str))
    assert written.split() == [*opening.removeprefix("<tool_call>").split(), '"', "!"]
    assert reader.calls == 0
