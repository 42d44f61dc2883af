"""The day's requests, and whether their answers are right."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from random import Random

from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError
from dynamo.core.reply import LogprobsPerToken, Reply, SendRequest
from dynamo.core.values import Finish, GenerateRequest, SamplingParams, Started, StopConditions
from dynamo.inference.mock.token_generator import MockTokenGenerator
from dynamo.testing.chaos.processes import MOCK_VOCABULARY, MODEL_NAME

GREEDY = SamplingParams(temperature=0.0)
COMMON_PREFIXES = 20
SHARED_PREFIX_SHARE = 0.5
"""So many of the prompts begin with one of the common prefixes, which are half a prompt long."""
STALL_S = 0.5
"""A gap so long is none of an engine's own."""


class SimulatedPrompts:
    """Made up, half of them with a common beginning."""

    def __init__(self, tokens: int, rng: Random) -> None:
        self._rng = rng
        self._tokens = tokens
        self._common_prefixes = [self._random_ids(tokens // 2) for _ in range(COMMON_PREFIXES)]

    def make(self) -> array[int]:
        """The ids of one."""
        if self._rng.random() >= SHARED_PREFIX_SHARE:
            return self._random_ids(self._tokens)
        common = self._common_prefixes[self._rng.randrange(COMMON_PREFIXES)]
        return common + self._random_ids(self._tokens - len(common))

    def _random_ids(self, count: int) -> array[int]:
        return array("I", array("H", self._rng.randbytes(2 * count)))


class RecordedReply(Reply):
    """Keeps what is said, and when."""

    __slots__ = ("_clock", "begin_count", "finishes", "ids", "last_token_s", "longest_gap_s")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.begin_count = 0
        self.ids = array("I")
        self.finishes: list[Finish] = []
        self.last_token_s = clock.now()
        self.longest_gap_s = 0.0

    def begin(self, started: Started) -> None:
        del started
        self.begin_count += 1

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        del logprobs
        now = self._clock.now()
        self.longest_gap_s = max(self.longest_gap_s, now - self.last_token_s)
        self.last_token_s = now
        self.ids.extend(ids)
        return True

    def finish(self, end: Finish) -> None:
        self.finishes.append(end)

    def expected_ids(self, prompt: array[int]) -> list[int]:
        """What should have been said, as far as something was."""
        return MockTokenGenerator(MOCK_VOCABULARY, prompt[:-1]).generate_tokens(
            prompt[-1], len(self.ids)
        )

    def find_fault(self, prompt: array[int], count: int) -> str:
        """What is wrong with it; "" where nothing is."""
        if len(self.ids) != count or list(self.ids) != self.expected_ids(prompt):
            return "altered" if len(self.ids) == count else "lost or doubled"
        if self.begin_count != 1:
            return "begun not once"
        if self.finishes != [Finish("length", count)]:
            return "ended wrongly"
        return ""


class SimulatedOutcome:
    """What came of the requests."""

    def __init__(self) -> None:
        self.requests = 0
        self.correct = 0
        self.failed: Counter[str] = Counter()
        self.failure_messages: list[str] = []
        """The first few failures in words."""
        self.durations_s, self.stalls_s = array("d"), array("d")
        self.in_flight = 0
        self.disconnected = 0


class SimulatedClients:
    """Sends requests and judges what comes back."""

    def __init__(
        self,
        send: SendRequest,
        clock: Clock,
        tally: SimulatedOutcome,
        answer_tokens: int,
        deadline_s: float,
    ) -> None:
        self._send = send
        self._clock = clock
        self._outcome = tally
        self._stops = StopConditions(max_tokens=answer_tokens, ignore_eos=True)
        self._deadline_s = deadline_s

    async def send_and_disconnect(self, prompt: array[int], after_s: float) -> None:
        """One request, whose client leaves; what was said until then must be right."""
        tally = self._outcome
        tally.disconnected += 1
        answer, name = RecordedReply(self._clock), f"h{tally.disconnected}"
        request = GenerateRequest(name, MODEL_NAME, prompt.tobytes(), GREEDY, self._stops)
        with suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                await self._send(request, Context(name, timeout_s=self._deadline_s), answer)
        if answer.expected_ids(prompt) != list(answer.ids):
            tally.failed["altered before the client left"] += 1

    async def send_and_check(self, prompt: array[int]) -> None:
        """One request, to its end."""
        tally, clock = self._outcome, self._clock
        tally.requests += 1
        tally.in_flight += 1
        name = f"r{tally.requests}"
        began, answer = clock.now(), RecordedReply(clock)
        request = GenerateRequest(name, MODEL_NAME, prompt.tobytes(), GREEDY, self._stops)
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._send(request, Context(name, timeout_s=self._deadline_s), answer)
        except TimeoutError:
            fault = "late"
        except DynamoError as error:
            fault = f"{error.code}: {error.message}"
        else:
            fault = answer.find_fault(prompt, self._stops.max_tokens)
        finally:
            tally.in_flight -= 1
        if not fault:
            tally.correct += 1
            tally.durations_s.append(clock.now() - began)
        else:
            tally.failed[fault.partition(":")[0]] += 1
            if len(tally.failure_messages) < 20:
                tally.failure_messages.append(
                    f"{name} at {began:.1f} s, {len(answer.ids)} tokens: {fault}"
                )
        if answer.longest_gap_s > STALL_S:
            tally.stalls_s.append(answer.longest_gap_s)
