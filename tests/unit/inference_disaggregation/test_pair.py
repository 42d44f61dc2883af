"""A prompt that one engine computes for another gives the answer of a single engine."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.unit.inference_disaggregation.pair import Pair, make_request, with_pair

from dynamo.core.values import GenerateRequest
from dynamo.testing.fakes import CollectedReply


async def local(pair: Pair, request: GenerateRequest) -> CollectedReply:
    """Return the answer of the prefill worker alone, which then forgets the prompt."""
    reply, task = pair.send(replace(request, prefill=""), pair.p.engine)
    await task
    pair.p.engine.clear_prefix_cache()
    return reply


@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 40, 41, 63])
def test_the_answer_is_that_of_one_engine(length: int) -> None:
    async def main(pair: Pair) -> None:
        request = make_request(range(length), top_logprobs=2)
        alone = await local(pair, request)
        reply = await pair.answer(request)
        assert (reply.ids, reply.extras[0], reply.end) == (alone.ids, alone.extras[0], alone.end)
        assert pair.peer.calls == 1
        assert pair.arrivals.blocks_arrived == -(-length // 4)
        assert not pair.arrivals.fallbacks

    with_pair(main)
