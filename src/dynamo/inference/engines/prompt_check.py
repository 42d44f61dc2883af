"""The check of a prompt before an engine gets it."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.core.errors import ContextLengthExceeded, InvalidRequest


def check_prompt(ids: Sequence[int], context_tokens: int, vocab_size: int) -> None:
    """Raise `InvalidRequest` for a prompt that an engine cannot compute. A limit of 0 is none.

    An id beyond the vocabulary may kill an engine that looks it up.
    """
    if not ids:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if context_tokens and len(ids) >= context_tokens:
        raise ContextLengthExceeded(
            f"the prompt has {len(ids)} tokens; the limit is {context_tokens - 1}"
        )
    if vocab_size and max(ids) >= vocab_size:
        raise InvalidRequest(
            f"token id {max(ids)} is not in the vocabulary of {vocab_size}", param="prompt"
        )
