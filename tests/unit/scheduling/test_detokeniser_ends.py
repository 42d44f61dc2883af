"""The end of a choice: once, with the held text, and with the right count."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from dynamo.core.fast_path import FastPath, TextTable
from dynamo.core.text import TextFinish, TextOptions
from dynamo.core.values import Finish
from dynamo.scheduling.processor.detokeniser import Detokeniser
from dynamo.scheduling.processor.stop_strings import StopStrings
from dynamo.scheduling.processor.vocabulary import Vocabulary

Ids = Callable[[str], tuple[int, ...]]


class AcceptingFastPath(FastPath):
    """Accepts every token."""

    def send_token(self, token: int) -> bool | None:
        self.tokens_sent += 1
        return True


def make(vocabulary: Vocabulary, reply: Any, **options: Any) -> Detokeniser:
    text_options = TextOptions(**options)
    stops = (
        StopStrings(text_options.stop, include_in_output=text_options.include_stop)
        if text_options.stop
        else None
    )
    return Detokeniser(0, vocabulary, text_options, stops, reply)


def finishes(reader: Any) -> list[TextFinish]:
    return [call[2] for call in reader.calls if call[0] == "finish"]


def test_tokens_of_every_fast_path_are_counted(
    vocabulary: Vocabulary, recording_reply: Any, ids_of: Ids
) -> None:
    """A migrated request opens a second fast path."""
    fast_paths: list[AcceptingFastPath] = []

    class Reader(recording_reply):  # type: ignore[misc]
        def open_fast_path(
            self, choice: int, text_table: TextTable, token_log: array[int] | None
        ) -> FastPath:
            fast_paths.append(AcceptingFastPath())
            return fast_paths[-1]

    reader, (a,), (word,) = Reader(), ids_of("a"), ids_of("ab")
    sink = make(vocabulary, reader, stop=("ab",), min_tokens=7)
    for _ in range(2):
        assert sink.tokens((a,))
        send_token = sink.open_fast_path()
        assert send_token is not None
        assert send_token(a)
        assert send_token(a)
    assert sink.tokens((word,))
    assert not sink.tokens((word,))
    assert finishes(reader) == [TextFinish("stop", 8, "ab")]
    assert len(fast_paths) == 2


def feed(sink: Detokeniser, ids: tuple[int, ...]) -> bool:
    return all(sink.tokens((token,)) for token in ids)


def test_a_shown_stop_token_may_complete_a_stop_string(
    vocabulary: Vocabulary, recording_reply: Any, ids_of: Ids
) -> None:
    reader, (a, e) = recording_reply(), (ids_of("a")[0], ids_of("e")[0])
    sink = make(vocabulary, reader, stop=("ae",), include_stop=True, stop_token_ids=(e,))
    assert sink.tokens((a,))
    sink.finish(Finish("stop", stop_token=e))
    assert reader.whole() == "ae"
    assert [end.stop for end in finishes(reader)] == ["ae"]


def test_an_answer_with_shown_stops_may_end_without_one(
    vocabulary: Vocabulary, recording_reply: Any, ids_of: Ids
) -> None:
    reader, (a,) = recording_reply(), ids_of("a")
    sink = make(vocabulary, reader, stop=("ae",), include_stop=True)
    assert sink.tokens((a,))
    sink.finish(Finish("length"))
    assert reader.whole() == "a"
    assert finishes(reader) == [TextFinish("length", 1)]


def test_nothing_is_sent_after_the_reader_wants_no_more(
    vocabulary: Vocabulary, recording_reply: Any, ids_of: Ids
) -> None:
    for stop in ((), ("abx", "z")):
        reader = recording_reply(limit=1)
        sink = make(vocabulary, reader, stop=stop)
        assert not feed(sink, ids_of("c") + ids_of("a"))
        assert reader.deltas() == ["c"]
    reader = recording_reply(limit=1)
    sink = make(vocabulary, reader, stop=("abx",))
    assert feed(sink, ids_of("a") + ids_of("b"))
    sink.finish(Finish("length"))
    assert (reader.deltas(), finishes(reader)) == (["a"], [])
