"""Tokenizers with context-dependent decoders: token by token gives the text of the whole."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Library

from dynamo.models.tokenization.tokenizer import Tokenizer, load_tokenizer
from dynamo.scheduling.processor.vocabulary import Vocabulary

SPECIAL = ["<unk>", "<s>", "</s>"]
WORDS = ["▁", "▁▁", "▁a", "▁the", "a", "the", "é", "日", "▁日", "\n", ".", "'", "\u0301"]
BYTES = [f"<0x{byte:02X}>" for byte in "日🎉\na\ufffd".encode()]
NAMES = [*SPECIAL, *WORDS, *dict.fromkeys(BYTES)]
any_ids = st.lists(
    st.one_of(
        st.integers(0, len(NAMES) - 1).map(lambda token: [token]),
        st.sampled_from(["日", "🎉"]).map(
            lambda char: [NAMES.index(f"<0x{byte:02X}>") for byte in char.encode()]
        ),
    ),
    max_size=12,
).map(lambda parts: [token for part in parts for token in part])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    numbered = {name: number for number, name in enumerate(NAMES)}
    library = Library(models.BPE(numbered, [], unk_token="<unk>", byte_fallback=True))
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    path: Path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.json"
    library.save(str(path))
    return load_tokenizer(path)


@settings(deadline=None)
@given(ids=any_ids, skip=st.booleans())
def test_text_and_bytes_equal_those_of_the_whole(
    tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    vocabulary = Vocabulary(tokenizer)
    fed = [token for token in ids if not (skip and token in vocabulary.special_ids)]
    whole = tokenizer.decode(fed)
    assume("\ufffd" not in whole)  # invalid UTF-8 makes the bytes before it wrong, too
    decoder = vocabulary.create_decoder(skip_special=skip)
    assert "".join(decoder.step(token) for token in fed) + decoder.end() == whole
    raw = b"".join(map(vocabulary.get_token_bytes, fed)).decode()
    assert raw in (whole, f" {whole}")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["the", "<0xE6>", "<0x97>"], "the"),
        (["the", "<0xE6>"], "the"),
        (["<0xE6>", "the"], "\ufffdthe"),
        (["the", "<0xEF>", "<0xBF>", "<0xBD>"], "the\ufffd"),
    ],
)
def test_only_a_character_that_the_end_cuts_is_left_out(
    tokenizer: Tokenizer, names: list[str], text: str
) -> None:
    decoder = Vocabulary(tokenizer).create_decoder(skip_special=True)
    decoded = "".join(decoder.step(NAMES.index(name)) for name in names)
    assert decoded + decoder.end() == text


@pytest.mark.parametrize(("token", "text"), [("<0xE6>", "\ufffd"), ("<s>", "")])
def test_tokens_without_text_are_decoded_in_bounded_windows(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, token: str, text: str
) -> None:
    decode, read = tokenizer.decode, []

    def counted(ids: Sequence[int], *, skip_special: bool = False) -> str:
        read.append(len(ids))
        return decode(ids, skip_special=skip_special)

    monkeypatch.setattr(tokenizer, "decode", counted)
    stream = tokenizer.stream_decoder()
    decoded = "".join(stream.step(NAMES.index(token)) for _ in range(100))
    decoded += stream.step(NAMES.index("the")) + stream.flush()
    assert decoded == text * 100 + "the"
    assert max(read) < 50
