"""The detokeniser: any chunking of ids gives the text of the whole decode, without broken
characters."""

import itertools
from codecs import getincrementaldecoder
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamo.core.codec import unpack_ids
from dynamo.core.text import DecodedTokenLogprob, TextFinish, TextOptions, TextReply
from dynamo.core.values import Finish, Started, TokenLogprobs
from dynamo.models.tokenization.tokenizer import Tokenizer
from dynamo.scheduling.processor.detokeniser import Detokeniser
from dynamo.scheduling.processor.stop_strings import StopStrings
from dynamo.scheduling.processor.vocabulary import Vocabulary

shared = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
odd_text = st.text(st.sampled_from("ab é日本語🎉👩‍👩‍👧\u0301\n"), max_size=30)
any_ids = st.lists(st.integers(0, 620), max_size=40)


class RecordingReply(TextReply):
    """Records deltas, logprobs and the end."""

    def __init__(self) -> None:
        self.deltas: list[str] = []
        self.logprobs: list[DecodedTokenLogprob] = []
        self.end: TextFinish | None = None

    def prompt(self, prompt_tokens: int, repeated_bytes: int = 0) -> None: ...

    def begin(self, choice: int, started: Started) -> None: ...

    def text(
        self, choice: int, delta: str, logprobs: Sequence[DecodedTokenLogprob] | None = None
    ) -> bool:
        assert delta or logprobs
        self.deltas.append(delta)
        self.logprobs += logprobs or ()
        return True

    def finish(self, choice: int, end: TextFinish) -> None:
        self.end = end


def chunks_of(ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    borders = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [list(ids[a:b]) for a, b in itertools.pairwise(borders)]


def answer(
    vocabulary: Vocabulary,
    chunks: Sequence[Sequence[int]],
    options: TextOptions,
    logprobs: bool = False,
) -> RecordingReply:
    reply = RecordingReply()
    stops = (
        StopStrings(options.stop, include_in_output=options.include_stop) if options.stop else None
    )
    sink = Detokeniser(0, vocabulary, options, stops, reply)
    for chunk in chunks:
        extra = [TokenLogprobs(token, -0.5) for token in chunk] if logprobs else None
        if not sink.tokens(chunk, extra):
            return reply
    sink.finish(Finish("length"))
    return reply


def decode_whole_characters(vocabulary: Vocabulary, ids: Sequence[int], skip: bool = True) -> str:
    """Return the text of ids without the character that their end cuts."""
    shown = [number for number in ids if not (skip and number in vocabulary.special_ids)]
    raw = b"".join(map(vocabulary.get_token_bytes, shown))
    return getincrementaldecoder("utf-8")("replace").decode(raw)


@shared
@given(ids=any_ids, cuts=st.lists(st.integers(0, 40), max_size=8), skip=st.booleans())
def test_any_chunking_decodes_like_the_whole(
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    ids: list[int],
    cuts: list[int],
    skip: bool,
) -> None:
    options = TextOptions(skip_special_tokens=skip)
    reply = answer(vocabulary, chunks_of(ids, cuts), options)
    whole = tokenizer.decode(ids, skip_special=skip)
    text = "".join(reply.deltas)
    assert text in (whole, whole.removesuffix("\ufffd"))
    assert text == decode_whole_characters(vocabulary, ids, skip)
    assert reply.end == TextFinish("length", len(ids))


@shared
@given(ids=any_ids)
def test_the_table_decodes_like_the_library(
    tokenizer: Tokenizer, vocabulary: Vocabulary, ids: list[int]
) -> None:
    assert vocabulary.decode(ids) == tokenizer.decode(ids)


@shared
@given(text=odd_text)
def test_no_delta_contains_a_broken_character(
    tokenizer: Tokenizer, vocabulary: Vocabulary, text: str
) -> None:
    ids = unpack_ids(tokenizer.encode(text))
    reply = answer(vocabulary, [[token] for token in ids], TextOptions())
    assert "".join(reply.deltas) == text
    assert not any("\ufffd" in delta for delta in reply.deltas)


@shared
@given(ids=any_ids, stop=st.lists(st.text("abet \n", min_size=1, max_size=4), max_size=3))
def test_stops_are_found_as_in_the_whole_text(
    vocabulary: Vocabulary, ids: list[int], stop: list[str]
) -> None:
    reply = answer(vocabulary, [[token] for token in ids], TextOptions(stop=tuple(stop)))
    whole = decode_whole_characters(vocabulary, ids)
    ends = [end for end in range(len(whole) + 1) if any(whole[:end].endswith(s) for s in stop)]
    assert reply.end is not None
    if ends:
        longest = max((s for s in stop if whole[: ends[0]].endswith(s)), key=len)
        assert "".join(reply.deltas) == whole[: ends[0] - len(longest)]
        assert (reply.end.reason, reply.end.stop) == ("stop", longest)
    else:
        assert "".join(reply.deltas) == whole
        assert reply.end == TextFinish("length", len(ids))


@shared
@given(ids=any_ids, stop=st.sampled_from([(), ("zz",), ("\n\n", " the")]))
def test_logprobs_come_once_with_their_text(
    vocabulary: Vocabulary, ids: list[int], stop: tuple[str, ...]
) -> None:
    reply = answer(vocabulary, [ids], TextOptions(stop=stop), logprobs=True)
    plain = answer(vocabulary, [ids], TextOptions(stop=stop))
    assert "".join(reply.deltas) == "".join(plain.deltas)
    known = [vocabulary.get_token_bytes(t) for t in ids if t not in vocabulary.special_ids]
    raws = [decoded.raw for decoded in reply.logprobs]
    assert raws == known[: len(raws)]
    if reply.end and reply.end.reason == "length" and reply.deltas:
        assert [raw for raw in raws if raw] == [raw for raw in known if raw]


@shared
@given(text=odd_text, stop=st.sampled_from([(), ("zz",), ("a ", "\n")]))
def test_offsets_are_positions_in_the_text(
    tokenizer: Tokenizer, vocabulary: Vocabulary, text: str, stop: tuple[str, ...]
) -> None:
    ids = unpack_ids(tokenizer.encode(text))
    reply = answer(vocabulary, [[token] for token in ids], TextOptions(stop=stop), logprobs=True)
    whole = text.encode()
    begun = 0
    for decoded in reply.logprobs:
        assert decoded.offset == len(whole[:begun].decode(errors="ignore"))
        begun += len(decoded.raw)


@shared
@given(text=odd_text)
def test_max_chars_bounds_the_length_of_a_text(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(tokenizer, "can_split", True)
    assert len(text) <= tokenizer.max_chars_of(len(unpack_ids(tokenizer.encode(text))))
