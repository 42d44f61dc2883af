"""Under virtual time: while a batch only decodes, many steps are taken in one event, so that a
simulation costs by the request and not by the token."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from dynamo.core.clock import Clock
from dynamo.inference.batching import StepScheduler
from dynamo.inference.runner import PredictableRunner, StepPlan

SHORTEST = 2
Deliver = Callable[[int, Sequence[Sequence[int]]], None]
"""So many steps were taken; what each running sequence sampled in them."""


class Leaper:
    """Takes the steady steps of one engine. Whoever wants to see the engine as it is calls
    `catch_up`; whoever changes its batch calls `interrupt`, and the leap ends with the step that
    is being computed at that moment."""

    def __init__(
        self, runner: PredictableRunner, clock: Clock, leaping: set[Leaper] | None = None
    ) -> None:
        """`leaping`: keeps those who are in the midst of a leap."""
        self._runner = runner
        self._clock = clock
        self._leaping = set() if leaping is None else leaping
        self._landing: asyncio.Future[None] | None = None
        self._disarm: Callable[[], None] = _nothing
        self._ends: list[float] = []
        self._last = 0
        self._done = 0
        self.ends: Sequence[float] = ()
        """While tokens of a leap are handed out: when the steps that made them ended."""

    def attach(self, scheduler: StepScheduler, deliver: Deliver) -> None:
        """Leap for this scheduler; what it brings goes to `deliver`."""
        self._scheduler = scheduler
        self._deliver = deliver

    async def leap(self, plan: StepPlan) -> None:
        """`plan` is completed. Returns when a step must be planned anew, maybe at once."""
        steps = self._scheduler.steady_steps(plan)
        if steps < SHORTEST:
            return
        seqs = plan.decode_seqs
        self._ends = self._runner.decode_ends(seqs, plan.decode_context + seqs, steps)
        self._last, self._done = steps, 0
        self._landing = asyncio.get_running_loop().create_future()
        self._arm()
        self._leaping.add(self)
        try:
            await self._landing
        finally:
            self._leaping.discard(self)
            self._disarm()
            self._landing = None
        self._take(self._last)
        self._runner.skip_to(self._ends[self._last - 1])

    def interrupt(self) -> None:
        """The batch is about to change: land at the end of the step that is being computed."""
        if self._landing is None or self._landing.done():
            return
        last = bisect_left(self._ends, self._clock.now(), self._done) + 1
        self.catch_up()
        if last < self._last:
            self._last = last
            self._disarm()
            self._arm()

    def catch_up(self) -> None:
        """Hand out what is computed by now."""
        if self._landing is not None:
            self._take(bisect_right(self._ends, self._clock.now(), self._done, self._last))

    def _arm(self) -> None:
        self._disarm = self._clock.call_at(self._ends[self._last - 1], self._land)

    def _land(self) -> None:
        if self._landing is not None and not self._landing.done():
            self._landing.set_result(None)

    def _take(self, until: int) -> None:
        steps = until - self._done
        if steps <= 0:
            return
        self.ends = self._ends[self._done : until]
        self._done = until
        sampled = self._runner.decoded(self._scheduler.running, steps)
        self._scheduler.advance(steps, sampled)
        self._deliver(steps, sampled)
        self.ends = ()


def _nothing() -> None:
    """No timer is armed."""
