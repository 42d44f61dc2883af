"""Skips steady decode steps in virtual time.

While a batch only decodes, many steps are handled in one event. The cost of a simulation then
depends on the number of requests and not on the number of tokens.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dynamo.core.clock import Clock
from dynamo.inference.model_runner import PredictableModelRunner, StepPlan
from dynamo.inference.sequence import ResolveRequest
from dynamo.inference.step_scheduler import StepScheduler

MIN_STEPS = 2
"""Fewer steady steps than this are computed one by one."""
WaitUntilQuiescent = Callable[[], Awaitable[None]]
"""Returns when no other task can run at this instant of virtual time."""
DeliverSteps = Callable[[Any, Sequence[Sequence[int]]], None]
"""Receives an array of the times when the steps ended and, for each running sequence, the tokens.
"""


class RealTime:
    """The time of an engine that computes each of its steps. `resolve_request` supplies the
    contents of simulated requests; None: requests are taken with the tokens that they carry."""

    resolve_request: ResolveRequest | None = None

    def attach(self, scheduler: StepScheduler, deliver: DeliverSteps) -> None:
        """Skip steps of this scheduler and pass the results to `deliver`."""

    async def wait_until_quiescent(self) -> None:
        """Wait until no other task can run at this instant of virtual time."""

    async def skip_steady_steps(self, plan: StepPlan) -> None:
        """Skip the steps that follow the completed `plan`, and return when a step must be planned.
        Returns at once if there are fewer than `MIN_STEPS` steady steps."""

    def interrupt(self) -> None:
        """Stop at the end of the step that is being computed, because the batch will change."""

    def catch_up(self) -> None:
        """Deliver the tokens of all steps that have ended by now."""


class FastForward(RealTime):
    """Virtual time that skips the steady steps of one engine. Code that reads the engine's state
    calls `catch_up` first. Code that changes its batch calls `interrupt`: skipping then ends with
    the step that is being computed at that moment."""

    def __init__(
        self,
        runner: PredictableModelRunner,
        clock: Clock,
        wait_until_quiescent: WaitUntilQuiescent,
        resolve_request: ResolveRequest | None = None,
        active: dict[FastForward, None] | None = None,
    ) -> None:
        """`active`: this object is a key of it while it skips steps."""
        self.resolve_request = resolve_request
        self._wait_until_quiescent = wait_until_quiescent
        self._runner = runner
        self._clock = clock
        self._active: dict[FastForward, None] = {} if active is None else active
        self._completion: asyncio.Future[None] | None = None
        self._cancel_timer: Callable[[], None] = lambda: None
        self._step_ends: Any = ()
        self._last_step = 0
        self._delivered_steps = 0
        self.delivered_step_ends: Any = ()
        """End times of the steps whose tokens are being delivered now, an array, else empty."""

    def attach(self, scheduler: StepScheduler, deliver: DeliverSteps) -> None:
        self._scheduler = scheduler
        self._deliver = deliver

    async def wait_until_quiescent(self) -> None:
        await self._wait_until_quiescent()

    async def skip_steady_steps(self, plan: StepPlan) -> None:
        steps = self._scheduler.steady_steps(plan)
        if steps < MIN_STEPS:
            return
        running = self._scheduler.running
        context = sum(sequence.length for sequence in running)
        self._step_ends = self._runner.decode_end_times(len(running), context, steps)
        self._last_step, self._delivered_steps = steps, 0
        self._plan_next()
        self._completion = asyncio.get_running_loop().create_future()
        self._set_timer()
        self._active[self] = None
        try:
            await self._completion
        finally:
            self._active.pop(self, None)
            self._cancel_timer()
            self._completion = None
        self._deliver_up_to(self._last_step)
        self._runner.skip_to(float(self._step_ends[self._last_step - 1]))

    def interrupt(self) -> None:
        if self._completion is None or self._completion.done():
            return
        last = bisect_left(self._step_ends, self._clock.now(), self._delivered_steps) + 1
        self.catch_up()
        if last < self._last_step:
            self._last_step = last
            self._cancel_timer()
            self._set_timer()

    def catch_up(self) -> None:
        if self._completion is not None:
            self._deliver_up_to(
                bisect_right(
                    self._step_ends, self._clock.now(), self._delivered_steps, self._last_step
                )
            )

    def _set_timer(self) -> None:
        self._cancel_timer = self._clock.call_at(
            float(self._step_ends[self._last_step - 1]), self._complete
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
        self._deliver(self.delivered_step_ends, sampled)
        self.delivered_step_ends = ()
        if until < self._last_step:
            self._plan_next()

    def _plan_next(self) -> None:
        """Give the next step its blocks where tiers can see them. The events of the steps before
        are published already, as without skipping."""
        if self._scheduler.tiers.can_load:
            self._scheduler.advance(0, [()] * len(self._scheduler.running), next_planned=True)
