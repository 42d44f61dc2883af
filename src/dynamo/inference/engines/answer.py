"""The answer of a foreign engine to one request: how it is begun, counted and finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.core.errors import ContextLengthExceeded, InvalidRequest
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.reply import LogprobsPerToken, Reply
from dynamo.core.timing.worker_times import WorkerTimes
from dynamo.core.values import (
    EngineTotals,
    Finish,
    FinishReason,
    GenerateRequest,
    PromptTokenLogprob,
    Started,
    TokenLogprobs,
)


class ForeignAnswer:
    """Passes the answer to one `request` on to `reply`, and counts it in `totals`.

    `prompt_tokens`: 0 for a prompt in text. `prefill_tokens`: those that the engine still has to
    compute, as far as known. `cached_tokens`: those from its cache, None until it says so.
    `tokens`: ids, or parts of text, that have come so far. `times`: as the engine tells them at the
    end, None where it does not. `ahead`: how many requests its rank had before, the prompt tokens
    of these to compute, and those of the longest. `ended`: the reply is finished, or has
    enough. `prompt_logprobs`: those from the second prompt token on, where the request wants them.
    """

    def __init__(self, request: GenerateRequest, reply: Reply, totals: EngineTotals) -> None:
        prompt_tokens = 0 if request.text is not None else len(request.token_ids) // TOKEN_BYTES
        self.request = request
        self._reply = reply
        self._totals = totals
        self.prompt_tokens = self.prefill_tokens = prompt_tokens
        self.tokens = 0
        self.cached_tokens: int | None = None
        self.ended = False
        self.prompt_logprobs: tuple[PromptTokenLogprob, ...] = ()
        self.times: WorkerTimes | None = None
        self.ahead = (0, 0, 0)
        self._begun = False
        totals.requests += 1
        totals.prompt_tokens += prompt_tokens

    def begin(self, cached_tokens: int | None = None) -> None:
        """Begin the reply, unless it has begun. None: the engine has not said what it had
        cached."""
        if self.cached_tokens is None and cached_tokens is not None:
            self.cached_tokens = cached_tokens
            self._totals.cached_tokens += cached_tokens
        if not self._begun:
            self._begun = True
            self._reply.begin(
                Started(cached_tokens=cached_tokens or 0, prompt_tokens=self.prompt_tokens)
            )

    def send(
        self,
        ids: Sequence[int],
        logprobs: LogprobsPerToken | None = None,
        cached_tokens: int | None = None,
    ) -> bool:
        """Pass the next ids on. False: no more is wanted."""
        if not self.tokens:
            self.prefill_tokens = 0
            self.begin(cached_tokens)
        self.tokens += len(ids)
        self._totals.generated_tokens += len(ids)
        return self._reply.tokens(ids, logprobs)

    def finish(
        self,
        reason: FinishReason,
        stop_token: int | None = None,
        cached_tokens: int | None = None,
        **fields: Any,
    ) -> None:
        """End the answer. The `stop_token` is counted and was not sent. `fields`: others of
        `Finish`, also a count of the engine's own."""
        was_unknown = self._begun and self.cached_tokens is None
        self.begin(cached_tokens)
        if stop_token is not None:
            self.tokens += 1
            self._totals.generated_tokens += 1
        self.ended = True
        fields = {
            "completion_tokens": self.tokens,
            "cached_tokens": cached_tokens if was_unknown else None,
            "prompt_logprobs": self.prompt_logprobs,
            "times": self.times,
        } | fields
        self._reply.finish(Finish(reason, stop_token=stop_token, **fields))


def check_prompt(ids: Sequence[int], context_tokens: int, vocab_size: int) -> None:
    """Raise `InvalidRequest` for a prompt that an engine cannot compute. 0: no limit.

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


def read_ranked_logprobs(
    ids: Sequence[int], positions: Sequence[Mapping[int, Any]], top: int
) -> list[TokenLogprobs]:
    """Return the logprobs of tokens. `positions` have, for each, entries with `logprob` and `rank`
    by id, as vLLM and TensorRT-LLM make them."""
    return [
        TokenLogprobs(token, position[token].logprob, best_of(position, top))
        for token, position in zip(ids, positions, strict=False)
    ]


def best_of(position: Mapping[int, Any], top: int | None) -> tuple[tuple[int, float], ...]:
    """Return the `top` ids of a position with their logprobs, best first."""
    ranked = sorted(position.items(), key=lambda entry: entry[1].rank or 0)
    return tuple((token, entry.logprob) for token, entry in ranked[:top])
