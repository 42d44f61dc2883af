"""Under virtual time: while a batch only decodes, many steps are taken in one event, so that a
simulation costs by the request and not by the token."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from dynamo.core.clock import Clock
from dynamo.inference.model_runner import PredictableModelRunner, StepPlan
from dynamo.inference.step_scheduler import StepScheduler

MIN_STEPS = 2
DeliverSteps = Callable[[int, Sequence[Sequence[int]]], None]
"""So many steps were taken; what each running sequence sampled in them."""


class FastForward:
    """Takes the steady steps of one engine. Whoever wants to see the engine as it is calls
    `catch_up`; whoever changes its batch calls `interrupt`, and the leap ends with the step that
    is being computed at that moment."""

    def __init__(
        self, runner: PredictableModelRunner, clock: Clock, active: set[FastForward] | None = None
    ) -> None:
        """`leaping`: keeps those who are in the midst of a leap."""
        self._runner = runner
        self._clock = clock
        self._active = set() if active is None else active
        self._completion: asyncio.Future[None] | None = None
        self._cancel_timer: Callable[[], None] = _no_timer
        self._step_ends: list[float] = []
        self._last_step = 0
        self._delivered_steps = 0
        self.delivered_step_ends: Sequence[float] = ()
        """While tokens of a leap are handed out: when the steps that made them ended."""

    def attach(self, scheduler: StepScheduler, deliver: DeliverSteps) -> None:
        """Leap for this scheduler; what it brings goes to `deliver`."""
        self._scheduler = scheduler
        self._deliver = deliver

    async def skip_steady_steps(self, plan: StepPlan) -> None:
        """`plan` is completed. Returns when a step must be planned anew, maybe at once."""
        steps = self._scheduler.steady_steps(plan)
        if steps < MIN_STEPS:
            return
        seqs = plan.decode_seqs
        self._step_ends = self._runner.decode_end_times(seqs, plan.decode_context + seqs, steps)
        self._last_step, self._delivered_steps = steps, 0
        self._completion = asyncio.get_running_loop().create_future()
        self._set_timer()
        self._active.add(self)
        try:
            await self._completion
        finally:
            self._active.discard(self)
            self._cancel_timer()
            self._completion = None
        self._deliver_up_to(self._last_step)
        self._runner.skip_to(self._step_ends[self._last_step - 1])

    def interrupt(self) -> None:
        """The batch is about to change: land at the end of the step that is being computed."""
        if self._completion is None or self._completion.done():
            return
        last = bisect_left(self._step_ends, self._clock.now(), self._delivered_steps) + 1
        self.catch_up()
        if last < self._last_step:
            self._last_step = last
            self._cancel_timer()
            self._set_timer()

    def catch_up(self) -> None:
        """Hand out what is computed by now."""
        if self._completion is not None:
            self._deliver_up_to(
                bisect_right(
                    self._step_ends, self._clock.now(), self._delivered_steps, self._last_step
                )
            )

    def _set_timer(self) -> None:
        self._cancel_timer = self._clock.call_at(
            self._step_ends[self._last_step - 1], self._complete
        )

    def _complete(self) -> None:
        if self._completion is not None and not self._completion.done():
            self._completion.set_result(None)

    def _deliver_up_to(self, until: int) -> None:
        steps = until - self._delivered_steps
        if steps <= 0:
            return
        self.delivered_step_ends = self._step_ends[self._delivered_steps : until]
        self._delivered_steps = until
        sampled = self._runner.decode_tokens(self._scheduler.running, steps)
        self._scheduler.advance(steps, sampled)
        self._deliver(steps, sampled)
        self.delivered_step_ends = ()


def _no_timer() -> None:
    """No timer is armed."""
