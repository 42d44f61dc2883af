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
from dynamo.core.reply import Extra, Reply, Send
from dynamo.core.values import Finish, GenerateRequest, Sampling, Started, Stops
from dynamo.inference.mock.tokens import Voice
from dynamo.testing.day.processes import MODEL, WORDS

GREEDY = Sampling(temperature=0.0)
PREFIXES = 20
SHARED = 0.5
"""So many of the prompts begin with one of the common prefixes, which are half a prompt long."""
HIT_S = 0.5
"""A gap so long is none of an engine's own."""


class Prompts:
    """Made up, half of them with a common beginning."""

    def __init__(self, tokens: int, rng: Random) -> None:
        self._rng = rng
        self._tokens = tokens
        self._common = [self._ids(tokens // 2) for _ in range(PREFIXES)]

    def make(self) -> array[int]:
        """The ids of one."""
        if self._rng.random() >= SHARED:
            return self._ids(self._tokens)
        common = self._common[self._rng.randrange(PREFIXES)]
        return common + self._ids(self._tokens - len(common))

    def _ids(self, count: int) -> array[int]:
        return array("I", array("H", self._rng.randbytes(2 * count)))


class Answer(Reply):
    """Keeps what is said, and when."""

    __slots__ = ("_clock", "begun", "ends", "ids", "last_s", "longest_s")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.begun = 0
        self.ids = array("I")
        self.ends: list[Finish] = []
        self.last_s = clock.now()
        self.longest_s = 0.0

    def begin(self, started: Started) -> None:
        del started
        self.begun += 1

    def tokens(self, ids: Sequence[int], extra: Extra | None = None) -> bool:
        del extra
        now = self._clock.now()
        self.longest_s = max(self.longest_s, now - self.last_s)
        self.last_s = now
        self.ids.extend(ids)
        return True

    def finish(self, end: Finish) -> None:
        self.ends.append(end)

    def right(self, prompt: array[int]) -> list[int]:
        """What should have been said, as far as something was."""
        return Voice(WORDS, prompt[:-1]).say(prompt[-1], len(self.ids))

    def fault(self, prompt: array[int], count: int) -> str:
        """What is wrong with it; "" where nothing is."""
        if len(self.ids) != count or list(self.ids) != self.right(prompt):
            return "altered" if len(self.ids) == count else "lost or doubled"
        if self.begun != 1:
            return "begun not once"
        if self.ends != [Finish("length", count)]:
            return "ended wrongly"
        return ""


class Tally:
    """What came of the requests."""

    def __init__(self) -> None:
        self.requests = 0
        self.right = 0
        self.failed: Counter[str] = Counter()
        self.told: list[str] = []
        """The first few failures in words."""
        self.took_s, self.hit_s = array("d"), array("d")
        self.under_way = 0
        self.hung_up = 0


class Asking:
    """Sends requests and judges what comes back."""

    def __init__(
        self, send: Send, clock: Clock, tally: Tally, answer_tokens: int, deadline_s: float
    ) -> None:
        self._send = send
        self._clock = clock
        self._tally = tally
        self._stops = Stops(max_tokens=answer_tokens, ignore_eos=True)
        self._deadline_s = deadline_s

    async def hang_up(self, prompt: array[int], after_s: float) -> None:
        """One request, whose client leaves; what was said until then must be right."""
        tally = self._tally
        tally.hung_up += 1
        answer, name = Answer(self._clock), f"h{tally.hung_up}"
        request = GenerateRequest(name, MODEL, prompt.tobytes(), GREEDY, self._stops)
        with suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                await self._send(request, Context(name, timeout_s=self._deadline_s), answer)
        if answer.right(prompt) != list(answer.ids):
            tally.failed["altered before the client left"] += 1

    async def ask(self, prompt: array[int]) -> None:
        """One request, to its end."""
        tally, clock = self._tally, self._clock
        tally.requests += 1
        tally.under_way += 1
        name = f"r{tally.requests}"
        began, answer = clock.now(), Answer(clock)
        request = GenerateRequest(name, MODEL, prompt.tobytes(), GREEDY, self._stops)
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._send(request, Context(name, timeout_s=self._deadline_s), answer)
        except TimeoutError:
            fault = "late"
        except DynamoError as error:
            fault = f"{error.code}: {error.message}"
        else:
            fault = answer.fault(prompt, self._stops.max_tokens)
        finally:
            tally.under_way -= 1
        if not fault:
            tally.right += 1
            tally.took_s.append(clock.now() - began)
        else:
            tally.failed[fault.partition(":")[0]] += 1
            if len(tally.told) < 20:
                tally.told.append(f"{name} at {began:.1f} s, {len(answer.ids)} tokens: {fault}")
        if answer.longest_s > HIT_S:
            tally.hit_s.append(answer.longest_s)
