"""The requests of a chaos run and the checks of their answers."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from random import Random

from msgspec.structs import replace
from tests.simulation.chaos.processes import MOCK_VOCABULARY, MODEL_NAME

from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError
from dynamo.core.reply import LogprobsPerToken, Reply, SendRequest
from dynamo.core.values import Finish, GenerateRequest, SamplingParams, Started, StopConditions
from dynamo.inference.mock.runner import MockTokenGenerator

GREEDY = SamplingParams(temperature=0.0)
COMMON_PREFIXES = 20
SHARED_PREFIX_SHARE = 0.5
"""Share of the prompts that begin with a common prefix, which is half a prompt long."""
STALL_S = 0.5
"""A longer gap between two tokens cannot come from the engine itself."""


class SimulatedPrompts:
    """Random prompts, half of which share a common prefix."""

    def __init__(self, tokens: int, rng: Random) -> None:
        self._rng = rng
        self._tokens = tokens
        self._common_prefixes = [self._random_ids(tokens // 2) for _ in range(COMMON_PREFIXES)]

    def make(self) -> array[int]:
        """Return the token ids of a prompt."""
        if self._rng.random() >= SHARED_PREFIX_SHARE:
            return self._random_ids(self._tokens)
        common = self._common_prefixes[self._rng.randrange(COMMON_PREFIXES)]
        return common + self._random_ids(self._tokens - len(common))

    def _random_ids(self, count: int) -> array[int]:
        return array("I", array("H", self._rng.randbytes(2 * count)))


class RecordedReply(Reply):
    """Records the tokens and the longest gap between them."""

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
        """Return the correct tokens, as many as have arrived."""
        return MockTokenGenerator(MOCK_VOCABULARY, prompt[:-1]).generate_tokens(
            prompt[-1], len(self.ids)
        )

    def find_fault(self, prompt: array[int], count: int) -> str:
        """Return the fault of a complete answer, or ""."""
        if len(self.ids) != count or list(self.ids) != self.expected_ids(prompt):
            return "altered" if len(self.ids) == count else "lost or doubled"
        if self.begin_count != 1:
            return "not begun once"
        if [replace(end, times=None) for end in self.finishes] != [Finish("length", count)]:
            return "ended wrongly"
        return ""


class SimulatedOutcome:
    """The results of all requests so far."""

    def __init__(self) -> None:
        self.requests = 0
        self.correct = 0
        self.failed: Counter[str] = Counter()
        self.failure_messages: list[str] = []
        self.durations_s, self.stalls_s = array("d"), array("d")
        self.in_flight = 0
        self.disconnected = 0


class SimulatedClients:
    """Sends requests and checks the answers."""

    def __init__(
        self,
        send: SendRequest,
        clock: Clock,
        outcome: SimulatedOutcome,
        answer_tokens: int,
        deadline_s: float,
    ) -> None:
        self._send = send
        self._clock = clock
        self._outcome = outcome
        self._stops = StopConditions(max_tokens=answer_tokens, ignore_eos=True)
        self._deadline_s = deadline_s

    async def send_and_disconnect(self, prompt: array[int], after_s: float) -> None:
        """Send a request and cancel it after `after_s`. The tokens until then must be correct."""
        outcome = self._outcome
        outcome.disconnected += 1
        answer, name = RecordedReply(self._clock), f"h{outcome.disconnected}"
        request = GenerateRequest(name, MODEL_NAME, prompt.tobytes(), GREEDY, self._stops)
        with suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                await self._send(request, Context(name, timeout_s=self._deadline_s), answer)
        if answer.expected_ids(prompt) != list(answer.ids):
            outcome.failed["altered before the client left"] += 1

    async def send_and_check(self, prompt: array[int]) -> None:
        """Send a request and check its whole answer."""
        outcome, clock = self._outcome, self._clock
        outcome.requests += 1
        outcome.in_flight += 1
        name = f"r{outcome.requests}"
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
            outcome.in_flight -= 1
        if not fault:
            outcome.correct += 1
            outcome.durations_s.append(clock.now() - began)
        else:
            outcome.failed[fault.partition(":")[0]] += 1
            if len(outcome.failure_messages) < 20:
                outcome.failure_messages.append(
                    f"{name} at {began:.1f} s, {len(answer.ids)} tokens: {fault}"
                )
        if answer.longest_gap_s > STALL_S:
            outcome.stalls_s.append(answer.longest_gap_s)
