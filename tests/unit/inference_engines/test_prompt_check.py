"""Prompts that no adapter passes on to its engine."""

from __future__ import annotations

import pytest

from dynamo.core.errors import ContextLengthExceeded, InvalidRequest
from dynamo.inference.engines.answer import check_prompt


@pytest.mark.parametrize(
    ("ids", "context_tokens", "vocab_size", "error", "message"),
    [
        ((), 0, 0, InvalidRequest, "is empty"),
        ((1, 2, 3), 3, 0, ContextLengthExceeded, "has 3 tokens; the limit is 2"),
        ((1, 9), 0, 9, InvalidRequest, "token id 9 is not in the vocabulary of 9"),
    ],
)
def test_prompts_that_are_refused(
    ids: tuple[int, ...],
    context_tokens: int,
    vocab_size: int,
    error: type[InvalidRequest],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        check_prompt(ids, context_tokens, vocab_size)


def test_limits_of_zero_are_none() -> None:
    check_prompt((1, 1 << 30), 0, 0)
    check_prompt((1, 8), 3, 9)
