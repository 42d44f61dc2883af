"""Two engines that compute prompts for each other, under random requests and faults."""

from __future__ import annotations

import asyncio
from array import array

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.inference_disaggregation.pair import DirectPeer, Pair, make_request, with_pair

from dynamo.core.errors import DynamoError
from dynamo.inference.disaggregation.peer_prefill import PeerPrefill, PrefillPeer
from dynamo.inference.mock.runner import MockTokenGenerator
from dynamo.testing.fakes import CollectedReply

VOCABULARY = range(100, 900)
REQUESTS = st.tuples(
    st.integers(0, 2),  # the beginning of the prompt
    st.integers(1, 60),  # its length
    st.integers(1, 30),  # the length of the answer
    st.booleans(),  # which engine answers
    st.booleans(),  # whether the other one computes the prompt
    st.sampled_from(["", "", "", "leaves", "enough"]),
    st.integers(0, 2),  # the priority
)
FAULTS = st.sampled_from(
    ["request", "request", "request", "clear", "sever", "rejoin", "fail a step", "freeze"]
)


class FlexiblePair(Pair):
    """Both workers compute prompts for each other. A frozen one starts no calls for 6 s."""

    async def start(self) -> None:
        await super().start()
        self.workers = (self.p, self.d)
        self.frozen_until_s = 0.0
        self.peer.before_call = self._wait_while_frozen
        back = DirectPeer(self.d, self.p)
        back.before_call = self._wait_while_frozen

        async def find(instance_id: str) -> PrefillPeer | None:
            return back if instance_id == "d" else None

        self.p.engine.kv_source = PeerPrefill(find, self.clock, "p")

    async def _wait_while_frozen(self) -> None:
        await self.clock.sleep_until(self.frozen_until_s)

    def act(self, fault: str, number: int) -> None:
        worker = self.workers[number % 2]
        if fault == "clear":
            worker.engine.clear_prefix_cache()
        elif fault == "sever":
            worker.plane.sever()
        elif fault == "rejoin":
            worker.plane.rejoin()
        elif fault == "freeze":
            self.frozen_until_s = self.clock.now() + 6
        elif fault == "fail a step":
            self._fail_next_step(worker.engine.runner)

    def _fail_next_step(self, runner: object) -> None:
        def fail(*_: object) -> None:
            del runner._sample_chunks  # type: ignore[attr-defined]
            raise ArithmeticError("a step fails")

        runner._sample_chunks = fail  # type: ignore[attr-defined]


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    generator = MockTokenGenerator(VOCABULARY, array("I", prompt))
    first = generator.next_token()
    return [first, *generator.generate_tokens(first, count - 1)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(FAULTS, REQUESTS, st.integers(0, 60)), min_size=5, max_size=25),
    st.integers(30, 80),
    st.integers(2, 6),
    st.sampled_from([7, 16, 64]),
)
def test_answers_are_right_or_fail_and_nothing_is_left(
    actions: list[tuple[str, tuple, int]], blocks: int, seqs: int, budget: int
) -> None:
    async def main(pair: Pair) -> None:
        assert isinstance(pair, FlexiblePair)
        sent: list[tuple[CollectedReply, asyncio.Task[None], list[int], int]] = []
        for fault, (beginning, length, answer, at_d, remote, end, level), pause_ms in actions:
            if fault == "request":
                prompt = [beginning] * (length // 2) + list(range(length - length // 2))
                other = ("p" if at_d else "d") if remote else ""
                request = make_request(prompt, prefill=other, max_tokens=answer, priority=level)
                limit = answer // 2 + 1 if end == "enough" else None
                reply, task = pair.send(request, pair.workers[at_d].engine, limit)
                if end == "leaves":
                    pair.clock.call_at(pair.clock.now() + length / 1e3, task.cancel)
                sent.append((reply, task, prompt, limit or answer))
            else:
                pair.act(fault, length)
            await pair.clock.sleep(pause_ms / 1e3)
        for worker in pair.workers:
            worker.plane.rejoin()
        for reply, task, prompt, count in sent:
            await asyncio.wait((task,))
            expected = expected_tokens(prompt, max(count, len(reply.ids)))
            assert reply.ids == expected[: len(reply.ids)]
            if not task.cancelled() and task.exception() is None:
                assert len(reply.ids) >= count  # several may come at once
            elif not task.cancelled():
                assert isinstance(task.exception(), DynamoError)

    sizes = {"num_blocks": blocks, "max_num_seqs": seqs, "max_num_batched_tokens": budget}
    with_pair(main, sizes, sizes, FlexiblePair)
