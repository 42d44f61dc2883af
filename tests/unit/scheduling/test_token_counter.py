"""The processor tells the tokens of each choice before their text."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo.core.context import Context
from dynamo.core.text import CompletionRequest, TextOptions


@pytest.mark.parametrize("n", [1, 2])
async def test_tokens_are_counted_before_their_text(
    make_processor: Any, scripted_engine: Any, recording_reply: Any, ids_of: Any, n: int
) -> None:
    ids, reply = ids_of("the quick fox"), recording_reply()
    counts: list[tuple[int, int]] = []
    reply.count_tokens = lambda choice, tokens: counts.append((choice, tokens))
    options = TextOptions(n=n, max_tokens=len(ids), count_tokens=True)
    processor = make_processor(scripted_engine(ids).send)
    await processor.complete(CompletionRequest("m", "the", options), Context("r"), reply)
    for choice in range(n):
        assert sum(tokens for of, tokens in counts if of == choice) == len(ids)
        assert reply.whole(choice) == "the quick fox"
