"""One choice's way back: events, stops, logprobs, counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from dynamo.core.text import TextFinish, TextOptions
from dynamo.core.values import Finish, Started, TokenLogprobs
from dynamo.models.tokenization.tokenizer import load_tokenizer_blocking
from dynamo.scheduling.processor.detokeniser import Detokeniser
from dynamo.scheduling.processor.stop_strings import StopStrings
from dynamo.scheduling.processor.vocabulary import Vocabulary

Ids = Callable[[str], tuple[int, ...]]


def make(vocabulary: Vocabulary, told: Any, echo: str = "", **options: Any) -> Detokeniser:
    about = TextOptions(**options)
    stops = StopStrings(about.stop, include_in_output=about.include_stop) if about.stop else None
    return Detokeniser(0, vocabulary, about, stops, told, echo)


def feed(sink: Detokeniser, ids: Sequence[int]) -> bool:
    return all(sink.tokens((token,)) for token in ids)


def test_every_token_is_a_delta(vocabulary: Vocabulary, told: Any, ids_of: Ids) -> None:
    reader, ids = told(), ids_of("the quick brown fox")
    sink = make(vocabulary, reader)
    sink.begin(Started())
    assert sink.tokens(ids)
    sink.finish(Finish("length"))
    assert reader.deltas() == [vocabulary.texts[token] for token in ids]
    assert reader.ends() == {0: TextFinish("length", len(ids))}


def test_a_character_waits_for_its_bytes(vocabulary: Vocabulary, told: Any, ids_of: Ids) -> None:
    reader, ids = told(), ids_of("🎉!")
    assert len(ids) == 5
    feed(make(vocabulary, reader), ids)
    assert reader.deltas() == ["🎉", "!"]


def test_what_stays_incomplete_is_shown_at_the_end(
    vocabulary: Vocabulary, told: Any, ids_of: Ids
) -> None:
    reader = told()
    sink = make(vocabulary, reader)
    feed(sink, ids_of("a🎉")[:-1])
    assert reader.deltas() == ["a"]
    sink.finish(Finish("length"))
    assert reader.whole() == "a\ufffd"


def test_special_tokens_only_when_asked(vocabulary: Vocabulary, told: Any, ids_of: Ids) -> None:
    ids = ids_of("a<|im_end|>b")
    hidden, shown = told(), told()
    for reader, skip in ((hidden, True), (shown, False)):
        sink = make(vocabulary, reader, skip_special_tokens=skip)
        feed(sink, ids)
        sink.finish(Finish("length"))
    assert hidden.deltas() == ["a", "b"]
    assert shown.deltas() == ["a", "<|im_end|>", "b"]
    assert hidden.ends()[0].completion_tokens == 3


def test_an_id_that_no_token_has_is_no_text(vocabulary: Vocabulary, told: Any, ids_of: Ids) -> None:
    reader = told()
    assert feed(make(vocabulary, reader), [*ids_of("a"), 70_000, *ids_of("b")])
    assert reader.deltas() == ["a", "b"]


def test_held_text_keeps_one_delta_a_token(vocabulary: Vocabulary, told: Any, ids_of: Ids) -> None:
    reader, ids = told(), ids_of("a") + ids_of("b") + ids_of("c") + ids_of("d") + ids_of("e")
    sink = make(vocabulary, reader, stop=("bcX",))
    feed(sink, ids[:3])
    assert reader.deltas() == ["a"]
    feed(sink, ids[3:])
    assert reader.deltas() == ["a", "b", "c", "d", "e"]


def test_a_stop_string_ends_the_choice(vocabulary: Vocabulary, told: Any, ids_of: Ids) -> None:
    reader = told()
    sink = make(vocabulary, reader, stop=("zzz", "cd"))
    assert feed(sink, ids_of("a") + ids_of("b") + ids_of("c"))
    assert not sink.tokens(ids_of("d") + ids_of("e"))
    assert reader.whole() == "ab"
    assert reader.ends() == {0: TextFinish("stop", 4, "cd")}


def test_a_stop_string_may_be_included(vocabulary: Vocabulary, told: Any, ids_of: Ids) -> None:
    reader = told()
    assert not feed(make(vocabulary, reader, stop=("cd",), include_stop=True), ids_of("a b cde"))
    assert reader.whole() == "a b cd"


def test_held_text_comes_out_at_the_end(vocabulary: Vocabulary, told: Any, ids_of: Ids) -> None:
    reader = told()
    sink = make(vocabulary, reader, stop=("the end",))
    feed(sink, ids_of("this is the e"))
    assert reader.whole() == "this is "
    sink.finish(Finish("stop", stop_token=2))
    assert reader.whole() == "this is the e"
    assert reader.ends()[0].reason == "stop"
    assert reader.ends()[0].stop is None


def test_stop_strings_wait_for_min_tokens(vocabulary: Vocabulary, told: Any, ids_of: Ids) -> None:
    letters = [ids_of(letter)[0] for letter in "xaxbxc"]
    reader = told()
    assert not feed(make(vocabulary, reader, stop=("x",), min_tokens=3), letters)
    assert reader.whole() == "xaxb"
    assert reader.ends() == {0: TextFinish("stop", 5, "x")}


@pytest.mark.parametrize(("asked", "shown"), [((), None), ((65,), 65)])
def test_a_stop_token_is_named_if_it_was_asked_for(
    vocabulary: Vocabulary, told: Any, asked: tuple[int, ...], shown: int | None
) -> None:
    reader = told()
    make(vocabulary, reader, stop_token_ids=asked).finish(Finish("stop", stop_token=65))
    assert reader.ends() == {0: TextFinish("stop", 0, shown)}
    assert reader.whole() == ""


def test_a_stop_token_may_be_included(vocabulary: Vocabulary, told: Any, ids_of: Ids) -> None:
    reader, (stop,) = told(), ids_of("q")
    sink = make(vocabulary, reader, stop_token_ids=(stop,), include_stop=True)
    feed(sink, ids_of("a"))
    sink.finish(Finish("stop", stop_token=stop))
    assert reader.whole() == "aq"
    assert reader.ends() == {0: TextFinish("stop", 1, stop)}


def test_the_readers_enough_goes_up(vocabulary: Vocabulary, told: Any, ids_of: Ids) -> None:
    reader = told(limit=2)
    sink = make(vocabulary, reader)
    one, two, *_ = ids = ids_of("the quick brown fox")
    assert sink.tokens((one,))
    assert not sink.tokens((two,))
    assert not make(vocabulary, told(limit=1)).tokens(ids)
    assert reader.ends() == {}


def test_logprobs_come_with_their_text(vocabulary: Vocabulary, told: Any, ids_of: Ids) -> None:
    reader = told()
    ids = ids_of("a") + ids_of("é")
    extra = [TokenLogprobs(token, -0.1 * n, ((token, -0.5),)) for n, token in enumerate(ids)]
    sink = make(vocabulary, reader)
    for token, one in zip(ids[:2], extra[:2], strict=True):
        sink.tokens((token,), [one])
    assert [one.token for one in reader.logprobs] == ["a"]
    assert reader.logprobs[0].top == (("a", b"a", -0.5),)
    sink.tokens(ids[2:], extra[2:])
    assert b"".join(one.raw for one in reader.logprobs[1:]) == "é".encode()
    assert reader.deltas() == ["a", "é"]


def test_logprobs_of_a_stop_string_stay_here(
    vocabulary: Vocabulary, told: Any, ids_of: Ids
) -> None:
    reader, ids = told(), ids_of("a") + ids_of("b") + ids_of("c")
    sink = make(vocabulary, reader, stop=("bc",))
    sink.tokens(ids, [TokenLogprobs(token, -1.0) for token in ids])
    assert [one.token for one in reader.logprobs] == ["a"]


def test_an_echo_stands_in_front(vocabulary: Vocabulary, told: Any, ids_of: Ids) -> None:
    reader = told()
    sink = make(vocabulary, reader, echo="said: ", stop=("said",))
    sink.begin(Started())
    feed(sink, ids_of("a"))
    assert reader.calls == [("begin", 0), ("text", 0, "said: "), ("text", 0, "a")]


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
    vocabulary = Vocabulary(load_tokenizer_blocking(tmp_path / "tokenizer.json"))
    raws = [vocabulary.get_token_bytes(number) for number in range(1, len(words) + 1)]
    said = [" ", " a", " hello", "hello", "é", "\ufffd", "\n"]
    assert raws == [*(one.encode() for one in said), b"\xf0", b""]


def test_a_tokenizer_without_exact_bytes(tmp_path: Any, told: Any) -> None:
    words = {"<unk>": 0, "▁hello": 1, "▁world": 2, "s": 3}
    library = Library(models.WordLevel(words, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.save(str(tmp_path / "tokenizer.json"))
    vocabulary, reader = Vocabulary(load_tokenizer_blocking(tmp_path / "tokenizer.json")), told()
    sink = make(vocabulary, reader, stop=("dsx",))
    feed(sink, [1, 2, 3])
    sink.finish(Finish("length"))
    assert reader.deltas() == ["hello", " worl", "ds"]
