from random import Random
from sys import getsizeof

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dynamo.models.tokenization.encoders import FastEncoder
from dynamo.models.tokenization.segment_cache import SEGMENT_CHARS, SegmentCache, TextSplitter
from dynamo.models.tokenization.tokenizer import Tokenizer
from dynamo.models.tokenization.tokenizer_file import read_tokenizer_file
from dynamo.models.tokenization.verification_corpus import verification_texts

TURN = "<|im_start|>user\n{}<|im_end|>\n"
LONG = "hello world and the other thing's " * 200


class Counting(FastEncoder):
    """Counts what it is asked to encode."""

    def __init__(self, path) -> None:
        super().__init__(path)
        self.chars = 0

    def encode(self, text: str, parse_special: bool = True) -> bytes:
        self.chars += len(text)
        return super().encode(text, parse_special)


@pytest.fixture
def encoder(tokenizer_path):
    return Counting(tokenizer_path)


@pytest.fixture
def tokenizer(encoder, tokenizer_path):
    return Tokenizer(encoder, read_tokenizer_file(tokenizer_path), cuts_proven=True)


def test_every_text_of_the_proof_gives_the_whole_ids(tokenizer):
    cache = SegmentCache(tokenizer)
    specials = [token.content for token in tokenizer.added_tokens]
    for text in [*verification_texts(tokenizer.token_bytes, specials, seed=3)][::9]:
        assert cache.encode(text) == tokenizer.encode(text)
        assert cache.encode(text) == tokenizer.encode(text)


def test_a_growing_conversation_costs_its_tail(tokenizer, encoder):
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


def test_growing_inside_one_message_keeps_its_cuts(tokenizer, encoder):
    cache = SegmentCache(tokenizer)
    text = LONG
    cache.encode(text)
    for _ in range(5):
        text += " and the next words of it"
        encoder.chars = 0
        cache.encode(text)
        assert encoder.chars < 2 * SEGMENT_CHARS


def test_the_cache_is_bounded_and_counts_itself(tokenizer):
    cache = SegmentCache(tokenizer, capacity_bytes=200_000)
    chance = Random(1)
    for _ in range(300):
        text = TURN.format("".join(chance.choices("abcdef the ", k=3000)))
        assert cache.encode(text) == tokenizer.encode(text)
        assert cache.size_bytes <= 200_000
    held = [*cache._young.items(), *cache._old.items()]
    assert cache.size_bytes >= sum(getsizeof(key) + getsizeof(ids) for key, ids in held)
    assert len(held) > 10


def test_what_is_used_stays(tokenizer, encoder):
    cache = SegmentCache(tokenizer, capacity_bytes=100_000)
    chance = Random(2)
    cache.encode(LONG)
    for _ in range(100):
        cache.encode("".join(chance.choices("abcdef the ", k=1500)))
        encoder.chars = 0
        cache.encode("" + LONG)
        assert encoder.chars == 0


def test_a_piece_larger_than_the_cache_is_not_kept(tokenizer):
    cache = SegmentCache(tokenizer, capacity_bytes=4_000)
    assert cache.encode("x" * 9_000) == tokenizer.encode("x" * 9_000)
    assert cache.size_bytes == 0


def test_unproven_tokenizers_are_not_cut(encoder, tokenizer_path):
    whole = Tokenizer(encoder, read_tokenizer_file(tokenizer_path), cuts_proven=False)
    cache = SegmentCache(whole)
    text = TURN.format(LONG)
    cache.encode(text)
    assert cache.encode(text) == whole.encode(text)
    assert (cache.hits, cache.misses) == (1, 1)
    assert cache.uncached_chars(text + "!") == len(text) + 1


def test_looking_into_huge_texts_is_not_free(tokenizer):
    cache = SegmentCache(tokenizer)
    text = "a b " * 100_000
    cache.encode(text)
    assert cache.uncached_chars(text) == len(text)


@given(some.text(alphabet="ab <|>\n中。", max_size=300), some.integers(1, 40))
def test_pieces_are_the_text(text, cut_chars):
    pieces = TextSplitter(["<|a|>", "<|ab|>"], cut_chars).split(text)
    assert "".join(pieces) == text
    assert all(pieces)


@given(some.text(alphabet="ab<|", max_size=400))
def test_special_tokens_are_found_as_by_a_plain_search(text):
    words = ["<a", "<ab", "<|b"]
    expected, plain, at = [], "", 0
    while at < len(text):
        hits = [word for word in words if text.startswith(word, at)]
        if hits:
            expected += [plain, max(hits, key=len)]
            at += len(expected[-1])
            plain = ""
        else:
            plain += text[at]
            at += 1
    expected.append(plain)
    assert TextSplitter(words).split(text) == [piece for piece in expected if piece]
    assert TextSplitter([]).split(text) == ([text] if text else [])


def test_dense_first_characters_and_several_first_characters():
    text = "<" * 1000 + "<a" + "x[b"
    assert TextSplitter(["<a"]).split(text) == ["<" * 1000, "<a", "x[b"]
    assert TextSplitter(["<a", "[b"]).split(text) == ["<" * 1000, "<a", "x", "[b"]


def test_short_texts_are_not_kept(tokenizer, encoder):
    cache = SegmentCache(tokenizer)
    text = TURN.format("a short word or two")
    assert cache.encode(text) == tokenizer.encode(text)
    assert cache.size_bytes == 0
    assert cache.uncached_chars(text) == len(text)
