"""The detokeniser: however ids come, the text is that of the whole decode, and no character is
split."""

import itertools
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


class Told(TextReply):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.deltas: list[str] = []
        self.logprobs: list[DecodedTokenLogprob] = []
        self.end: TextFinish | None = None

    def prompt(self, prompt_tokens: int) -> None: ...

    def begin(self, choice: int, started: Started) -> None: ...

    def text(
        self, choice: int, delta: str, logprobs: Sequence[DecodedTokenLogprob] | None = None
    ) -> bool:
        assert delta
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
) -> Told:
    told = Told()
    stops = (
        StopStrings(options.stop, include_in_output=options.include_stop) if options.stop else None
    )
    sink = Detokeniser(0, vocabulary, options, stops, told)
    for chunk in chunks:
        extra = [TokenLogprobs(token, -0.5) for token in chunk] if logprobs else None
        if not sink.tokens(chunk, extra):
            return told
    sink.finish(Finish("length"))
    return told


@shared
@given(ids=any_ids, cuts=st.lists(st.integers(0, 40), max_size=8), skip=st.booleans())
def test_any_ids_decode_as_the_whole(
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    ids: list[int],
    cuts: list[int],
    skip: bool,
) -> None:
    options = TextOptions(skip_special_tokens=skip)
    told = answer(vocabulary, chunks_of(ids, cuts), options)
    assert "".join(told.deltas) == tokenizer.decode(ids, skip_special=skip)
    assert told.end == TextFinish("length", len(ids))


@shared
@given(ids=any_ids)
def test_the_table_reads_whole_ids_as_the_library_does(
    tokenizer: Tokenizer, vocabulary: Vocabulary, ids: list[int]
) -> None:
    assert vocabulary.decode(ids) == tokenizer.decode(ids)


@shared
@given(text=odd_text)
def test_whole_text_never_shows_a_broken_character(
    tokenizer: Tokenizer, vocabulary: Vocabulary, text: str
) -> None:
    ids = unpack_ids(tokenizer.encode(text))
    told = answer(vocabulary, [[token] for token in ids], TextOptions())
    assert "".join(told.deltas) == text
    assert not any("\ufffd" in delta for delta in told.deltas)


@shared
@given(ids=any_ids, stop=st.lists(st.text("abet \n", min_size=1, max_size=4), max_size=3))
def test_stops_over_tokens_as_over_the_whole(
    tokenizer: Tokenizer, vocabulary: Vocabulary, ids: list[int], stop: list[str]
) -> None:
    told = answer(vocabulary, [[token] for token in ids], TextOptions(stop=tuple(stop)))
    whole = tokenizer.decode(ids, skip_special=True)
    ends = [end for end in range(len(whole) + 1) if any(whole[:end].endswith(s) for s in stop)]
    assert told.end is not None
    if ends:
        longest = max((s for s in stop if whole[: ends[0]].endswith(s)), key=len)
        assert "".join(told.deltas) == whole[: ends[0] - len(longest)]
        assert (told.end.reason, told.end.stop) == ("stop", longest)
    else:
        assert "".join(told.deltas) == whole
        assert told.end == TextFinish("length", len(ids))


@shared
@given(ids=any_ids, stop=st.sampled_from([(), ("zz",), ("\n\n", " the")]))
def test_logprobs_come_once_with_their_text(
    vocabulary: Vocabulary, ids: list[int], stop: tuple[str, ...]
) -> None:
    told = answer(vocabulary, [ids], TextOptions(stop=stop), logprobs=True)
    plain = answer(vocabulary, [ids], TextOptions(stop=stop))
    assert "".join(told.deltas) == "".join(plain.deltas)
    known = [vocabulary.get_token_bytes(t) for t in ids if t not in vocabulary.special_ids]
    raws = [one.raw for one in told.logprobs]
    assert raws == known[: len(raws)]
    if told.end and told.end.reason == "length" and told.deltas:
        assert [raw for raw in raws if raw] == [raw for raw in known if raw]


@shared
@given(text=odd_text, stop=st.sampled_from([(), ("zz",), ("a ", "\n")]))
def test_offsets_say_where_in_the_text_a_token_stands(
    tokenizer: Tokenizer, vocabulary: Vocabulary, text: str, stop: tuple[str, ...]
) -> None:
    ids = unpack_ids(tokenizer.encode(text))
    told = answer(vocabulary, [[token] for token in ids], TextOptions(stop=stop), logprobs=True)
    whole = text.encode()
    begun = 0
    for one in told.logprobs:
        assert one.offset == len(whole[:begun].decode(errors="ignore"))
        begun += len(one.raw)


@shared
@given(text=odd_text)
def test_no_text_is_longer_than_its_tokens_can_be(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(tokenizer, "can_split", True)
    assert len(text) <= tokenizer.max_chars_of(len(unpack_ids(tokenizer.encode(text))))
