"""Detokeniser: deltas, stops, logprobs, counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from dynamo.core.text import TextFinish, TextOptions
from dynamo.core.values import Finish, Started, TokenLogprobs
from dynamo.models.tokenization.tokenizer import load_tokenizer
from dynamo.scheduling.processor.detokeniser import Detokeniser
from dynamo.scheduling.processor.stop_strings import StopStrings
from dynamo.scheduling.processor.vocabulary import Vocabulary

Ids = Callable[[str], tuple[int, ...]]


def make(vocabulary: Vocabulary, reply: Any, echo: str = "", **options: Any) -> Detokeniser:
    text_options = TextOptions(**options)
    stops = (
        StopStrings(text_options.stop, include_in_output=text_options.include_stop)
        if text_options.stop
        else None
    )
    return Detokeniser(0, vocabulary, text_options, stops, reply, echo)


def feed(sink: Detokeniser, ids: Sequence[int]) -> bool:
    return all(sink.tokens((token,)) for token in ids)


def test_every_token_is_a_delta(vocabulary: Vocabulary, recording_reply: Any, ids_of: Ids) -> None:
    reader, ids = recording_reply(), ids_of("the quick brown fox")
    sink = make(vocabulary, reader)
    sink.begin(Started())
    assert sink.tokens(ids)
    sink.finish(Finish("length"))
    assert reader.deltas() == [vocabulary.token_texts.texts[token] for token in ids]
    assert reader.ends() == {0: TextFinish("length", len(ids))}


def test_an_incomplete_character_is_held_back(
    vocabulary: Vocabulary, recording_reply: Any, ids_of: Ids
) -> None:
    reader, ids = recording_reply(), ids_of("🎉!")
    assert len(ids) == 5
    feed(make(vocabulary, reader), ids)
    assert reader.deltas() == ["🎉", "!"]


@pytest.mark.parametrize("reason", ["length", "stop"])
@pytest.mark.parametrize("left", [1, 2, 3])
def test_a_character_that_the_end_cuts_is_left_out(
    vocabulary: Vocabulary, recording_reply: Any, ids_of: Ids, left: int, reason: Any
) -> None:
    reader = recording_reply()
    sink = make(vocabulary, reader)
    feed(sink, ids_of("a🎉")[:-left])
    assert reader.deltas() == ["a"]
    sink.finish(Finish(reason))
    assert (reader.whole(), reader.ends()[0].completion_tokens) == ("a", 5 - left)


def test_logprobs_of_a_cut_character_are_sent(
    vocabulary: Vocabulary, recording_reply: Any, ids_of: Ids
) -> None:
    reader, ids = recording_reply(), ids_of("a🎉")[:-1]
    sink = make(vocabulary, reader)
    for token in ids:
        assert sink.tokens((token,), [TokenLogprobs(token, -0.5)])
    sink.finish(Finish("length"))
    assert reader.whole() == "a"
    assert len(reader.logprobs) == len(ids)


def test_bytes_that_are_no_character_are_replaced(
    vocabulary: Vocabulary, recording_reply: Any, ids_of: Ids
) -> None:
    reader, first = recording_reply(), ids_of("🎉")[0]
    sink = make(vocabulary, reader)
    feed(sink, [first, *ids_of("a")])
    sink.finish(Finish("length"))
    assert reader.whole() == "\ufffda"
    whole = recording_reply()
    sink = make(vocabulary, whole)
    feed(sink, ids_of("a\ufffd"))
    sink.finish(Finish("length"))
    assert whole.whole() == "a\ufffd"


def test_special_tokens_are_shown_on_request(
    vocabulary: Vocabulary, recording_reply: Any, ids_of: Ids
) -> None:
    ids = ids_of("a<|im_end|>b")
    hidden, shown = recording_reply(), recording_reply()
    for reader, skip in ((hidden, True), (shown, False)):
        sink = make(vocabulary, reader, skip_special_tokens=skip)
        feed(sink, ids)
        sink.finish(Finish("length"))
    assert hidden.deltas() == ["a", "b"]
    assert shown.deltas() == ["a", "<|im_end|>", "b"]
    assert hidden.ends()[0].completion_tokens == 3


def test_an_unknown_id_has_no_text(
    vocabulary: Vocabulary, recording_reply: Any, ids_of: Ids
) -> None:
    reader = recording_reply()
    assert feed(make(vocabulary, reader), [*ids_of("a"), 70_000, *ids_of("b")])
    assert reader.deltas() == ["a", "b"]


def test_held_text_keeps_one_delta_per_token(
    vocabulary: Vocabulary, recording_reply: Any, ids_of: Ids
) -> None:
    reader, ids = (
        recording_reply(),
        ids_of("a") + ids_of("b") + ids_of("c") + ids_of("d") + ids_of("e"),
    )
    sink = make(vocabulary, reader, stop=("bcX",))
    feed(sink, ids[:3])
    assert reader.deltas() == ["a"]
    feed(sink, ids[3:])
    assert reader.deltas() == ["a", "b", "c", "d", "e"]


def test_a_stop_string_ends_the_choice(
    vocabulary: Vocabulary, recording_reply: Any, ids_of: Ids
) -> None:
    reader = recording_reply()
    sink = make(vocabulary, reader, stop=("zzz", "cd"))
    assert feed(sink, ids_of("a") + ids_of("b") + ids_of("c"))
    assert not sink.tokens(ids_of("d") + ids_of("e"))
    assert reader.whole() == "ab"
    assert reader.ends() == {0: TextFinish("stop", 4, "cd")}


def test_a_stop_string_may_be_included(
    vocabulary: Vocabulary, recording_reply: Any, ids_of: Ids
) -> None:
    reader = recording_reply()
    assert not feed(make(vocabulary, reader, stop=("cd",), include_stop=True), ids_of("a b cde"))
    assert reader.whole() == "a b cd"


def test_held_text_is_sent_at_the_end(
    vocabulary: Vocabulary, recording_reply: Any, ids_of: Ids
) -> None:
    reader = recording_reply()
    sink = make(vocabulary, reader, stop=("the end",))
    feed(sink, ids_of("this is the e"))
    assert reader.whole() == "this is "
    sink.finish(Finish("stop", stop_token=2))
    assert reader.whole() == "this is the e"
    assert reader.ends()[0].reason == "stop"
    assert reader.ends()[0].stop is None


def test_stop_strings_wait_for_min_tokens(
    vocabulary: Vocabulary, recording_reply: Any, ids_of: Ids
) -> None:
    letters = [ids_of(letter)[0] for letter in "xaxbxc"]
    reader = recording_reply()
    assert not feed(make(vocabulary, reader, stop=("x",), min_tokens=3), letters)
    assert reader.whole() == "xaxb"
    assert reader.ends() == {0: TextFinish("stop", 5, "x")}


@pytest.mark.parametrize(("requested", "named"), [((), None), ((65,), 65)])
def test_a_stop_token_is_named_if_requested(
    vocabulary: Vocabulary, recording_reply: Any, requested: tuple[int, ...], named: int | None
) -> None:
    reader = recording_reply()
    make(vocabulary, reader, stop_token_ids=requested).finish(Finish("stop", stop_token=65))
    assert reader.ends() == {0: TextFinish("stop", 1, named)}
    assert reader.whole() == ""


def test_a_stop_token_may_be_included(
    vocabulary: Vocabulary, recording_reply: Any, ids_of: Ids
) -> None:
    reader, (stop,) = recording_reply(), ids_of("q")
    sink = make(vocabulary, reader, stop_token_ids=(stop,), include_stop=True)
    feed(sink, ids_of("a"))
    sink.finish(Finish("stop", stop_token=stop))
    assert reader.whole() == "aq"
    assert reader.ends() == {0: TextFinish("stop", 2, stop)}


def test_a_reader_that_wants_no_more_stops_the_tokens(
    vocabulary: Vocabulary, recording_reply: Any, ids_of: Ids
) -> None:
    reader = recording_reply(limit=2)
    sink = make(vocabulary, reader)
    first, second, *_ = ids = ids_of("the quick brown fox")
    assert sink.tokens((first,))
    assert not sink.tokens((second,))
    assert not make(vocabulary, recording_reply(limit=1)).tokens(ids)
    assert reader.ends() == {}


def test_logprobs_come_with_their_text(
    vocabulary: Vocabulary, recording_reply: Any, ids_of: Ids
) -> None:
    reader = recording_reply()
    ids = ids_of("a") + ids_of("é")
    extra = [TokenLogprobs(token, -0.1 * n, ((token, -0.5),)) for n, token in enumerate(ids)]
    sink = make(vocabulary, reader)
    for token, logprob in zip(ids[:2], extra[:2], strict=True):
        sink.tokens((token,), [logprob])
    assert [decoded.token for decoded in reader.logprobs] == ["a"]
    assert reader.logprobs[0].top == (("a", b"a", -0.5),)
    sink.tokens(ids[2:], extra[2:])
    assert b"".join(decoded.raw for decoded in reader.logprobs[1:]) == "é".encode()
    assert reader.deltas() == ["a", "é"]


def test_logprobs_of_a_stop_string_are_not_sent(
    vocabulary: Vocabulary, recording_reply: Any, ids_of: Ids
) -> None:
    reader, ids = recording_reply(), ids_of("a") + ids_of("b") + ids_of("c")
    sink = make(vocabulary, reader, stop=("bc",))
    sink.tokens(ids, [TokenLogprobs(token, -1.0) for token in ids])
    assert [decoded.token for decoded in reader.logprobs] == ["a"]


def test_an_echo_precedes_the_answer(
    vocabulary: Vocabulary, recording_reply: Any, ids_of: Ids
) -> None:
    reader = recording_reply()
    sink = make(vocabulary, reader, echo="prompt: ", stop=("prompt",))
    sink.begin(Started())
    feed(sink, ids_of("a"))
    assert reader.calls == [("begin", 0), ("text", 0, "prompt: "), ("text", 0, "a")]


def test_bytes_of_a_sentencepiece_token(tmp_path: Any) -> None:
    words = ["<unk>", "▁", "▁a", "▁hello", "hello", "é", "\ufffd", "<0x0A>", "<0xF0>"]
    numbered = {word: number for number, word in enumerate(words)}
    library = Library(models.BPE(numbered, [], unk_token="<unk>", byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Vocabulary(load_tokenizer(tmp_path / "tokenizer.json"))
    raws = [vocabulary.get_token_bytes(number) for number in range(1, len(words) + 1)]
    texts = [" ", " a", " hello", "hello", "é", "\ufffd", "\n"]
    assert raws == [*(text.encode() for text in texts), b"\xf0", b""]


def test_a_tokenizer_without_exact_bytes(tmp_path: Any, recording_reply: Any) -> None:
    words = {"<unk>": 0, "▁hello": 1, "▁world": 2, "s": 3}
    library = Library(models.WordLevel(words, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.save(str(tmp_path / "tokenizer.json"))
    vocabulary, reader = (
        Vocabulary(load_tokenizer(tmp_path / "tokenizer.json")),
        recording_reply(),
    )
    sink = make(vocabulary, reader, stop=("dsx",))
    feed(sink, [1, 2, 3])
    sink.finish(Finish("length"))
    assert reader.deltas() == ["hello", " worl", "ds"]
