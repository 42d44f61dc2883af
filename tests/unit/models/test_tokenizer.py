"""Tokenizers, their verification, and their conversion from GGUF files."""

import gc
import json
import struct
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from tests.support.sentencepiece import write_tokenizer

from dynamo.core.errors import InvalidRequest, ModelUnavailable
from dynamo.models.checkpoint.gguf import GgufFile
from dynamo.models.file_cache import file_ref
from dynamo.models.tokenization import encoders, verification
from dynamo.models.tokenization.encoders import (
    EncoderVerification,
    FastEncoder,
    ReferenceEncoder,
    cached_verification,
    verify_encoder,
)
from dynamo.models.tokenization.gguf_tokenizer import convert_tokenizer, converted_tokenizer_json
from dynamo.models.tokenization.tokenizer import (
    Tokenizer,
    load_tokenizer,
    read_text_token_ids,
)
from dynamo.models.tokenization.tokenizer_file import (
    can_split_text,
    read_tokenizer_file,
    token_bytes_table,
    with_explicit_splits,
)

TEXTS = [
    "hello world and the thing's 123 é中\n\n  x",
    "<|im_start|>user\nhello<|im_end|>\n",
    "", "👍🏽 e\u0301 \u200b\u3000", "<|im_start|", " a", "\r\n\t",
]  # fmt: skip


def ids(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


@pytest.fixture(params=[ReferenceEncoder, FastEncoder])
def tokenizer(request, tokenizer_path):
    return Tokenizer(request.param(tokenizer_path), read_tokenizer_file(tokenizer_path))


def test_ids_are_those_of_the_reference_library(tokenizer, tokenizer_path):
    library = tokenizers.Tokenizer.from_file(str(tokenizer_path))
    for text in TEXTS:
        encoded = ids(tokenizer.encode(text))
        assert encoded == library.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(encoded) == library.decode(encoded, skip_special_tokens=False)
        assert tokenizer.decode(encoded, skip_special=True) == library.decode(encoded)


def test_special_tokens_can_be_encoded_as_plain_text(tokenizer):
    text = "a<|im_end|>"
    assert 2 in ids(tokenizer.encode(text))
    plain = ids(tokenizer.encode(text, parse_special=False))
    assert not tokenizer.special_ids & set(plain)
    assert tokenizer.decode(plain) == text
    assert 2 in ids(tokenizer.encode(text))


def test_a_lone_surrogate_is_an_invalid_request(tokenizer):
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode("a\ud800")


def test_tables_have_bytes_texts_and_special_ids(tokenizer):
    table = tokenizer.token_bytes
    assert tokenizer.vocab_size == len(table)
    for number, raw in enumerate(table):
        assert raw is not None
        assert raw.decode(errors="replace") == tokenizer.decode([number])
    assert tokenizer.token_texts[ids(tokenizer.encode(" world"))[0]] == " world"
    assert tokenizer.token_texts[table.index(b"\xc3")] is None
    assert tokenizer.id_to_token(1) == "<|im_start|>"
    assert tokenizer.special_ids == {0, 1, 2}
    allowed = set(tokenizer.text_token_ids)
    assert allowed
    assert not allowed & tokenizer.special_ids
    assert all(tokenizer.decode([n]) and "\ufffd" not in tokenizer.decode([n]) for n in allowed)


def test_text_token_ids_are_read_without_an_encoder(tokenizer, tokenizer_path):
    assert read_text_token_ids(tokenizer_path) == tokenizer.text_token_ids
    assert read_text_token_ids(file_ref(tokenizer_path)) == tokenizer.text_token_ids


def test_the_stream_decoder_never_splits_a_character(tokenizer):
    text = "hello 中é👍 the end"
    stream = tokenizer.stream_decoder()
    parts = [stream.step(token) for token in ids(tokenizer.encode(text))]
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)
    assert tokenizer.stream_decoder().step(2) == ""
    cut = tokenizer.stream_decoder()
    for token in ids(tokenizer.encode("a👍"))[:-1]:
        cut.step(token)
    assert cut.flush() == "\ufffd"


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma"])
@pytest.mark.parametrize(
    "text", ["Hello", " Hello", "  x", "\n", "\n\n the", ".", "a", "日本", "0"]
)
def test_text_that_goes_on_has_no_space_before_it(tmp_path, family, text):
    """SentencePiece puts a space before a text, which its decoder drops at the beginning alone."""
    spaced = load_tokenizer(write_tokenizer(tmp_path / "tokenizer.json", family))
    encoded = ids(spaced.encode_behind_text(text))
    before = ids(spaced.encode("answer"))
    assert spaced.decode_behind_text(encoded) == text
    assert spaced.decode([*before, *encoded]) == f"answer{text}"


def test_special_tokens_are_added_on_request(edited_tokenizer):
    special = {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}
    token, text = (
        {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    )
    post_processor = {
        "type": "TemplateProcessing",
        "single": [token, text],
        "pair": [token, text],
        "special_tokens": special,
    }
    path = edited_tokenizer(post_processor=post_processor)
    for kind in (ReferenceEncoder, FastEncoder):
        tokenizer = Tokenizer(kind(path), read_tokenizer_file(path))
        bare = ids(tokenizer.encode("hello"))
        assert ids(tokenizer.encode("hello", add_special=True)) == [1, *bare]


def test_other_decoders_have_no_byte_table(edited_tokenizer):
    path = edited_tokenizer(decoder={"type": "Fuse"})
    tokenizer = Tokenizer(ReferenceEncoder(path), read_tokenizer_file(path))
    assert set(tokenizer.token_bytes) == {None}
    assert not any(tokenizer.token_texts)
    hello = ids(tokenizer.encode("hello"))[0]
    assert hello in tokenizer.text_token_ids
    assert tokenizer.text_token_ids == read_text_token_ids(path)
    assert not tokenizer.special_ids & set(tokenizer.text_token_ids)


def test_tokenizers_whose_texts_can_be_split(edited_tokenizer):
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "use_regex": True,
        "trim_offsets": True,
    }

    def allowed(*extra, **parts):
        return can_split_text(read_tokenizer_file(edited_tokenizer(*extra, **parts)))

    assert allowed()
    assert allowed(pre_tokenizer=level)
    assert allowed(normalizer={"type": "NFC"})
    assert not allowed(pre_tokenizer=level | {"add_prefix_space": True})
    assert not allowed(pre_tokenizer={"type": "Metaspace"})
    assert not allowed(pre_tokenizer=None)
    assert not allowed(normalizer={"type": "Lowercase"})
    stripping = {"id": 0, "content": "<|end|>", "lstrip": True}
    assert not allowed(added_tokens=[stripping])


def test_the_pattern_of_byte_level_is_a_split_of_its_own(edited_tokenizer):
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    digits = {"type": "Digits", "individual_digits": True}
    nested = {"type": "Sequence", "pretokenizers": [digits, level]}

    def steps(pre):
        path = edited_tokenizer(pre_tokenizer=pre)
        fast, reference = FastEncoder(path), ReferenceEncoder(path)
        texts = [
            *TEXTS,
            "it's 10 o'clock  \u00a0x\n\n y\u2028 z\u180e \u180e\u180ez ",
            " " * 70_000 + "end",
        ]
        assert [*map(fast.encode, texts)] == [*map(reference.encode, texts)]
        explicit = json.loads(with_explicit_splits(path.read_bytes()))["pre_tokenizer"]
        return explicit and [step["type"] for step in explicit["pretokenizers"]]

    assert steps(level) == ["Split", "ByteLevel"]
    assert steps({"type": "Sequence", "pretokenizers": [nested]}) == [
        "Digits",
        "Split",
        "ByteLevel",
    ]
    assert steps(level | {"use_regex": False}) == ["ByteLevel"]
    assert steps(level | {"add_prefix_space": True}) == ["ByteLevel"]
    assert steps(None) is None


def test_an_unverified_tokenizer_uses_the_reference(tokenizer_path):
    tokenizer = load_tokenizer(file_ref(tokenizer_path))
    assert tokenizer.encoder_name == "tokenizers"
    assert not tokenizer.can_split


def test_verification_runs_once_and_is_stored(tokenizer_path, monkeypatch):
    ref = file_ref(tokenizer_path)
    assert cached_verification(ref) is None
    tokenizer = load_tokenizer(ref, ensure_verified=True)
    result = cached_verification(ref)
    assert result is not None
    assert result.equal
    assert result.cuts
    assert result.texts > 2000
    assert tokenizer.encoder_name == "fastokens"
    assert tokenizer.can_split
    monkeypatch.setattr(encoders.sys, "executable", "/nowhere")
    assert verify_encoder(ref) == result
    assert load_tokenizer(tokenizer_path).encoder_name == "fastokens"


def test_an_encoder_that_differs_is_not_used(edited_tokenizer, monkeypatch):
    # the libraries assign different ids if an added token is already a word
    path = edited_tokenizer("Ġthe", "<|more|>")
    monkeypatch.setattr(
        verification, "verification_texts", lambda *_: iter(["a<|more|>b", "hello world"])
    )
    result = verification.compare_encoders(path)
    assert not result.equal
    assert "<|more|>" in result.reason
    assert isinstance(encoders.fastest_encoder(path, result), ReferenceEncoder)
    assert isinstance(encoders.fastest_encoder(path, None), ReferenceEncoder)


def test_the_reference_encodes_beyond_the_limits_of_the_fast_encoder(tokenizer_path, monkeypatch):
    document = json.loads(tokenizer_path.read_text())
    vocab = document["model"]["vocab"]
    vocab["unused"] = vocab.pop("Ć")  # byte 6: fastokens raises, the reference drops it
    document["pre_tokenizer"] = document["pre_tokenizer"]["pretokenizers"][1]
    tokenizer_path.write_text(json.dumps(document))
    fast, reference = FastEncoder(tokenizer_path), ReferenceEncoder(tokenizer_path)
    with pytest.raises(ValueError, match="byte 0x06"):
        fast.encode_without_fallback("a\x06b")
    assert fast.encode("a\x06b") == reference.encode("a\x06b")
    monkeypatch.setattr(verification, "verification_texts", lambda *_: iter(["a\x06b"]))
    assert not verification.compare_encoders(tokenizer_path).equal


def test_verification_detects_splits_that_change_ids(tokenizer_path, monkeypatch):
    monkeypatch.setattr(verification, "verification_texts", lambda *_: iter(["the world " * 50]))
    assert verification.compare_encoders(tokenizer_path).cuts
    document = json.loads(tokenizer_path.read_text())
    document["pre_tokenizer"]["pretokenizers"][1]["use_regex"] = False  # words merge over spaces
    space = next(word for word in document["model"]["vocab"] if word == "Ġ")
    document["model"]["merges"].insert(0, ["d", space])
    document["model"]["vocab"]["dĠ"] = len(document["model"]["vocab"])
    tokenizer_path.write_text(json.dumps(document))
    assert not verification.compare_encoders(tokenizer_path).cuts


def test_a_failed_verification_is_not_stored(tmp_path, tokenizer_path, monkeypatch):
    ref = file_ref(tokenizer_path)
    monkeypatch.setattr(encoders.sys, "executable", "/bin/false")
    assert verify_encoder(ref) == EncoderVerification(
        equal=False, cuts=False, reason="the verification ended with 1"
    )
    assert cached_verification(ref) is None
    tokenizer_path.unlink()
    with pytest.raises(ModelUnavailable, match="not on this host"):
        verify_encoder(ref)


def test_verification_as_a_command(tokenizer_path, tmp_path, monkeypatch):
    monkeypatch.setattr(verification, "verification_texts", lambda *_: iter(TEXTS))
    monkeypatch.setattr(verification.os, "nice", lambda _: 0)
    target = tmp_path / "verification.json"
    assert verification.main(str(tokenizer_path), str(target)) == 0
    assert json.loads(target.read_text())["equal"]
    assert verification.main(str(tmp_path / "none.json"), str(target)) == 1


def test_a_gguf_vocabulary_gives_the_same_tokenizer(write_gguf, tokenizer_path):
    with GgufFile(write_gguf()) as file:
        path = converted_tokenizer_json(file)
        assert converted_tokenizer_json(file) == path
    ours, theirs = ReferenceEncoder(path), ReferenceEncoder(tokenizer_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    assert token_bytes_table(read_tokenizer_file(path)) == token_bytes_table(
        read_tokenizer_file(tokenizer_path)
    )


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_gguf_pre_tokenizers_are_converted(write_gguf, tmp_path, pre):
    path = tmp_path / "tokenizer.json"
    with GgufFile(write_gguf({"tokenizer.ggml.pre": pre})) as file:
        path.write_bytes(convert_tokenizer(file))
    digits = {"gpt-2": 4, "llama-bpe": 2, "qwen2": 4}[pre]
    reference, fast = ReferenceEncoder(path), FastEncoder(path)
    pattern = tokenizers.Tokenizer.from_file(str(path)).pre_tokenizer
    assert len(pattern.pre_tokenize_str("1234")) == (1 if pre == "gpt-2" else digits)
    for text in TEXTS:
        assert reference.encode(text) == fast.encode(text)
    framed = ids(reference.encode_with_special_tokens("hello"))
    assert (framed[0] == 1) == (pre == "llama-bpe")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokenizer.ggml.pre": "poro-chat"}, "'poro-chat'"),
        ({"tokenizer.ggml.model": "t5"}, "'t5'"),
        ({"tokenizer.ggml.tokens": None}, "incomplete"),
        ({"tokenizer.ggml.token_type": [1]}, "incomplete"),
        ({"tokenizer.ggml.merges": 5}, "not an array"),
    ],
)
def test_other_gguf_vocabularies_are_refused(write_gguf, values, message):
    with GgufFile(write_gguf(values)) as file, pytest.raises(ModelUnavailable, match=message):
        convert_tokenizer(file)


def test_invalid_tokenizer_files_are_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("[]")
    with pytest.raises(ModelUnavailable, match="not a tokenizer"):
        load_tokenizer(path)
    path.write_text('{"model": {"type": "Unknown", "vocab": {}}}')
    with pytest.raises(ModelUnavailable, match="cannot be read"):
        load_tokenizer(path)


def test_the_reference_lets_other_threads_run(tokenizer_path):
    encoder, text = ReferenceEncoder(tokenizer_path), "some words and 12 " * 40_000
    encoder.encode(text[:100])
    encoding, ticks = threading.Event(), []

    def tick() -> None:
        while encoding.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    encoding.set()
    thread = threading.Thread(target=tick)
    thread.start()
    encoder.encode(text)
    encoding.clear()
    thread.join()
    assert len(ticks) > 10


def test_models_of_one_tokenizer_share_it_while_one_uses_it(tokenizer_path, tmp_path):
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes(tokenizer_path.read_bytes())
    with ThreadPoolExecutor() as threads:
        first, second = threads.map(load_tokenizer, (tokenizer_path, copy))
    assert first is second
    copy.write_text(copy.read_text() + " ")
    assert load_tokenizer(copy) is not first
    released = weakref.ref(first)
    del first, second
    gc.collect()
    assert released() is None
