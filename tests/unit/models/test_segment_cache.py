"""Splitting of texts and the cache of encoded segments."""

from random import Random
from sys import getsizeof

import pytest
from hypothesis import given, strategies

from dynamo.core.errors import ContextLengthExceeded
from dynamo.models.tokenization.encoders import FastEncoder
from dynamo.models.tokenization.segment_cache import SEGMENT_CHARS, SegmentCache, TextSplitter
from dynamo.models.tokenization.tokenizer import Tokenizer
from dynamo.models.tokenization.tokenizer_file import read_tokenizer_file
from dynamo.models.tokenization.verification_corpus import verification_texts

TURN = "<|im_start|>user\n{}<|im_end|>\n"
LONG = "hello world and the other thing's " * 200


class CountingEncoder(FastEncoder):
    """Counts the characters that it encodes."""

    def __init__(self, path) -> None:
        super().__init__(path)
        self.chars = 0

    def encode(self, text: str, parse_special: bool = True) -> bytes:
        self.chars += len(text)
        return super().encode(text, parse_special)


@pytest.fixture
def encoder(tokenizer_path):
    return CountingEncoder(tokenizer_path)


@pytest.fixture
def tokenizer(encoder, tokenizer_path):
    return Tokenizer(encoder, read_tokenizer_file(tokenizer_path), cuts_verified=True)


def test_segments_have_the_ids_of_the_whole_text(tokenizer):
    cache = SegmentCache(tokenizer)
    specials = [token.content for token in tokenizer.added_tokens]
    for text in [*verification_texts(tokenizer.token_bytes, specials, seed=3)][::9]:
        assert cache.encode(text) == tokenizer.encode(text)
        assert cache.encode(text) == tokenizer.encode(text)


def test_only_the_tail_of_a_growing_conversation_is_encoded(tokenizer, encoder):
    cache = SegmentCache(tokenizer)
    text = TURN.format(LONG) * 3
    cache.encode(text)
    chance = Random(0)
    for _ in range(20):
        text += TURN.format("".join(chance.choices("abc the ", k=3000)))
        expected = tokenizer.encode(text)
        encoder.chars = 0
        assert cache.uncached_chars(text) <= 3010
        assert cache.encode(text) == expected
        assert encoder.chars <= 3010
        assert cache.uncached_chars(text + "") == 0


def test_a_growing_message_is_split_at_the_same_places(tokenizer, encoder):
    cache = SegmentCache(tokenizer)
    text = LONG
    cache.encode(text)
    for _ in range(5):
        text += " and the next words of it"
        encoder.chars = 0
        cache.encode(text)
        assert encoder.chars < 2 * SEGMENT_CHARS


def test_the_cache_size_is_bounded_and_counted(tokenizer):
    cache = SegmentCache(tokenizer, capacity_bytes=200_000)
    chance = Random(1)
    for _ in range(300):
        text = TURN.format("".join(chance.choices("abcdef the ", k=3000)))
        assert cache.encode(text) == tokenizer.encode(text)
        assert cache.size_bytes <= 200_000
    entries = [*cache._young.items(), *cache._old.items()]
    assert cache.size_bytes >= sum(getsizeof(key) + getsizeof(ids) for key, ids in entries)
    assert len(entries) > 10


def test_used_segments_are_not_evicted(tokenizer, encoder):
    cache = SegmentCache(tokenizer, capacity_bytes=100_000)
    chance = Random(2)
    cache.encode(LONG)
    for _ in range(100):
        cache.encode("".join(chance.choices("abcdef the ", k=1500)))
        encoder.chars = 0
        cache.encode("" + LONG)
        assert encoder.chars == 0


def test_a_segment_larger_than_the_cache_is_not_cached(tokenizer):
    cache = SegmentCache(tokenizer, capacity_bytes=4_000)
    assert cache.encode("x" * 9_000) == tokenizer.encode("x" * 9_000)
    assert cache.size_bytes == 0


def test_texts_of_unverified_tokenizers_are_not_split(encoder, tokenizer_path):
    tokenizer = Tokenizer(encoder, read_tokenizer_file(tokenizer_path), cuts_verified=False)
    cache = SegmentCache(tokenizer)
    text = TURN.format(LONG)
    cache.encode(text)
    assert cache.encode(text) == tokenizer.encode(text)
    assert (cache.hits, cache.misses) == (1, 1)
    assert cache.uncached_chars(text + "!") == len(text) + 1


def test_all_characters_of_huge_texts_count_as_uncached(tokenizer):
    cache = SegmentCache(tokenizer)
    text = "a b " * 100_000
    cache.encode(text)
    assert cache.uncached_chars(text) == len(text)


@given(strategies.text(alphabet="ab <|>\n中。", max_size=300), strategies.integers(1, 40))
def test_segments_concatenate_to_the_text(text, cut_chars):
    segments = TextSplitter(["<|a|>", "<|ab|>"], cut_chars).split(text)
    assert "".join(segments) == text
    assert all(segments)


@given(strategies.text(alphabet="ab<|", max_size=400))
def test_special_tokens_are_split_as_by_a_plain_search(text):
    tokens = ["<a", "<ab", "<|b"]
    expected, plain, at = [], "", 0
    while at < len(text):
        matches = [token for token in tokens if text.startswith(token, at)]
        if matches:
            expected += [plain, max(matches, key=len)]
            at += len(expected[-1])
            plain = ""
        else:
            plain += text[at]
            at += 1
    expected.append(plain)
    assert TextSplitter(tokens).split(text) == [segment for segment in expected if segment]
    assert TextSplitter([]).split(text) == ([text] if text else [])


def test_repeated_and_several_first_characters_of_tokens():
    text = "<" * 1000 + "<a" + "x[b"
    assert TextSplitter(["<a"]).split(text) == ["<" * 1000, "<a", "x[b"]
    assert TextSplitter(["<a", "[b"]).split(text) == ["<" * 1000, "<a", "x", "[b"]


def test_short_texts_are_not_cached(tokenizer, encoder):
    cache = SegmentCache(tokenizer)
    text = TURN.format("a short word or two")
    assert cache.encode(text) == tokenizer.encode(text)
    assert cache.size_bytes == 0
    assert cache.uncached_chars(text) == len(text)


def test_a_long_run_without_a_cut_is_refused_before_it_is_encoded(tokenizer, encoder):
    cache = SegmentCache(tokenizer, max_segment_chars=10_000)
    text = "word " * 10_000
    assert cache.encode(text) == tokenizer.encode(text)
    encoder.chars = 0
    for run in (" ", "\n", "-", "7"):
        with pytest.raises(ContextLengthExceeded, match="without a word boundary"):
            cache.encode(text + run * 20_000 + " word")
    assert encoder.chars == 0


def test_encoding_ends_when_the_text_exceeds_the_context(tokenizer, encoder):
    text = "some words of a text " * 10_000
    cache = SegmentCache(tokenizer, max_tokens=2_000)
    with pytest.raises(ContextLengthExceeded, match="2000 tokens"):
        cache.encode(text)
    assert encoder.chars < 20_000
    assert cache.size_bytes == 0
    whole = SegmentCache(tokenizer, max_tokens=len(tokenizer.encode(text)) // 4)
    assert whole.encode(text) == tokenizer.encode(text)
