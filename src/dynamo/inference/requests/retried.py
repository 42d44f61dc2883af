"""Retried requests, whose replies begin before their first step is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dynamo.core.values import Started
from dynamo.inference.model_runner import StepPlan
from dynamo.inference.sequence import EngineSequence


def begin_reply(sequence: EngineSequence) -> None:
    """Begin the reply of a sequence. A second call changes nothing."""
    state = sequence.request_state
    if not state.reply_begun:
        state.reply_begun = True
        state.reply.begin(
            Started(cached_tokens=sequence.cached_tokens, prompt_tokens=sequence.prompt_tokens)
        )


class RetriedRequests(set[EngineSequence]):
    """The sequences of retried requests that no step has computed yet."""

    async def begin(self, plan: StepPlan, end: Callable[[EngineSequence, Exception], None]) -> None:
        """Begin the replies of those in `plan` before the step is computed. If that step kills the
        worker, the router knows which requests were in the batch. `end` ends one that fails."""
        admitted = self.intersection(chunk.sequence for chunk in plan.chunks)
        for sequence in admitted:
            try:
                begin_reply(sequence)
            except Exception as error:  # noqa: BLE001 - one bad reply must not end the others
                end(sequence, error)
        self.difference_update(admitted)
        await asyncio.sleep(0)
