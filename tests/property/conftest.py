"""Fixtures of the property tests."""

from pathlib import Path

import pytest

from dynamo.models.tokenizer import Tokenizer, read_tokenizer
from dynamo.scheduling.processor.vocabulary import Vocabulary


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model: Path) -> Tokenizer:
    """Byte-level BPE, every byte a token."""
    return read_tokenizer(tiny_model / "tokenizer.json")


@pytest.fixture(scope="session")
def tiny_vocabulary(tiny_tokenizer: Tokenizer) -> Vocabulary:
    """Its tables."""
    return Vocabulary(tiny_tokenizer)
