"""Logprobs of prompt tokens, from the rows of a step that computes prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dynamo.core.values import PromptTokenLogprob
from dynamo.inference.native.sampling import log_softmax, top_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo.inference.model_runner import StepChunk
    from dynamo.inference.native.array_backend import Array
    from dynamo.inference.native.buffers import Floats

ROWS_PER_SLICE = 64
"""Logits are computed for so many rows at once: 512 rows of 49,152 tokens would take 100 MB."""


def read_prompt_logprobs(
    chunks: Sequence[StepChunk],
    first_rows: Sequence[int],
    rows: Array,
    project: Callable[[Array], Floats],
) -> None:
    """Add the logprobs that these chunks tell to their sequences. `first_rows`: the row of the
    first token of each. `project` returns the logits of some of `rows`, until its next call. The
    row of a token tells the logprob of the next one."""
    for chunk, first_row in zip(chunks, first_rows, strict=True):
        sequence, start = chunk.sequence, chunk.start
        request = sequence.request
        if request is None or request.prompt_logprobs is None:
            continue
        if start == 0:
            sequence.prompt_logprobs = []
        end = min(start + chunk.count, sequence.prompt_tokens - request.resumed - 1)
        for low in range(start, end, ROWS_PER_SLICE):
            high = min(low + ROWS_PER_SLICE, end)
            logits = project(rows[first_row + low - start : first_row + high - start])
            for row, token in zip(logits, sequence.tokens[low + 1 : high + 1], strict=True):
                entry = make_prompt_logprob(row, token, request.prompt_logprobs)
                sequence.prompt_logprobs.append(entry)


def make_prompt_logprob(row: Floats, token: int, top: int) -> PromptTokenLogprob:
    """Return the logprob and rank of `token` and the `top` best tokens of a row of logits."""
    logprobs = log_softmax(row)
    best: list[int] = top_ids(logprobs, top).tolist() if top else []
    return PromptTokenLogprob(
        token,
        float(logprobs[token]),
        int(np.count_nonzero(row > row[token])) + 1,
        tuple((other, float(logprobs[other])) for other in best),
    )
