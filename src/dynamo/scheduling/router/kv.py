"""Routing by what the workers hold and do: arrivals of one turn of the loop are placed together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet

from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.values import GenerateRequest
from dynamo.runtime.client import Client
from dynamo.scheduling.router.labels import barred, constraints_of
from dynamo.scheduling.router.placing.arrival import Arrival
from dynamo.scheduling.router.placing.fleet import Active
from dynamo.scheduling.router.placing.placement import Placed, Placement
from dynamo.scheduling.router.policy import Decision, Policy, nobody
from dynamo.scheduling.router.prompt import ReadPrompt
from dynamo.scheduling.router.replicas.replicas import Replicas

Prepare = Callable[[Sequence[int]], Awaitable[None]]
"""Has what is known elsewhere of a prompt's blocks at hand before it is placed."""


class KvPolicy(Policy):
    """Drives a Placement by the loop: runs it once a turn when something has come, and when a
    worker may have become free for what waits."""

    def __init__(
        self,
        client: Client,
        placement: Placement,
        read: ReadPrompt,
        clock: Clock,
        *,
        block_tokens: int,
        name: str = "predicted",
    ) -> None:
        """`replicas`, once set, is told of every request that goes out."""
        self.placement = placement
        self.replicas: Replicas | None = None
        self._client = client
        self._read = read
        self._clock = clock
        self._block_tokens = block_tokens
        self._name = name
        self._armed = False
        self._due: float | None = None
        self._stop_timer: Callable[[], None] | None = None
        self.prepare: Prepare | None = None
        self.on_close: Callable[[], None] | None = None
        self._stop_listening = client.on_change(self._announced)
        self._announced()

    async def choose(
        self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
    ) -> Decision:
        loop = asyncio.get_running_loop()
        instances = self._client.instances
        out = frozenset(tried)
        if context.metadata:
            out |= barred(instances, context)
        if not (instances.keys() - out if out else instances):
            raise nobody(self._client)
        name = f"{context.request_id}/{request.choice}/{context.attempt}"
        now = self._clock.now()
        prompt = self._read(request)
        if self.prepare is not None:
            await self.prepare(prompt.hashes)
        arrival = Arrival(name, prompt, self._block_tokens, now, out)
        arrival.decided = loop.create_future()
        arrival.priority = request.priority
        if context.metadata:
            arrival.constraints = constraints_of(context)
        if context.timeout_s is not None:
            arrival.deadline_s = now + context.timeout_s
        self.placement.submit(arrival)
        self._arm()
        try:
            return await arrival.decided
        except BaseException:
            self.placement.withdraw(arrival)
            _give_back(arrival.decided)
            raise

    async def close(self) -> None:
        self._stop_listening()
        self.placement.fleet.replace({})
        self._fail_stranded()
        if self._stop_timer is not None:
            self._stop_timer()
        if self.on_close is not None:
            self.on_close()

    def look_again(self) -> None:
        """A worker may have become freer, by what another router says."""
        if not self._armed and len(self.placement):
            self._arm()

    def _announced(self) -> None:
        fleet = self.placement.fleet
        fleet.replace(self._client.instances)
        self.placement.view.cacheless(fleet.cacheless)
        self._fail_stranded()
        if len(self.placement):
            self._arm()

    def _fail_stranded(self) -> None:
        for arrival in self.placement.stranded():
            if arrival.decided is not None and not arrival.decided.done():
                arrival.decided.set_exception(nobody(self._client))

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            asyncio.get_running_loop().call_soon(self._place)

    def _place(self) -> None:
        self._armed = False
        now = self._clock.now()
        gone = self.placement.place(now)
        waiting = len(self.placement)
        for placed in gone:
            self._tell(placed, now, waiting)
        for arrival, error in self.placement.refused():
            if arrival.decided is not None and not arrival.decided.done():
                arrival.decided.set_exception(error)
        self._wait(self.placement.next_due(now))

    def _tell(self, placed: Placed, now: float, waiting: int) -> None:
        active, arrival = placed.active, placed.arrival
        active.on_first, active.on_end = self._first_token, self._ended
        decided = arrival.decided
        if decided is None or decided.done():
            self._ended(active)
            return
        book = active.book
        if self.replicas is not None:
            self.replicas.routed(book.name, active)
        decided.set_result(
            Decision(
                book.instance,
                self._name,
                placed.candidates,
                placed.table,
                overlap_blocks=arrival.overlaps.get(book.name, 0),
                prompt_blocks=len(arrival.prompt.hashes),
                best_overlap_blocks=max(arrival.overlaps.values(), default=0),
                predicted_ttft_s=active.due_s - now,
                waited_s=now - arrival.arrived_s,
                view=self.placement.view.mode(book.name),
                ticket=active,
                rank=book.rank,
                waiting=waiting,
            )
        )

    def _first_token(self, active: Active) -> None:
        self.placement.first_token(active, self._clock.now())
        if self.replicas is not None:
            self.replicas.first_token(active.id)
        self.look_again()

    def _ended(self, active: Active) -> None:
        self.placement.ended(active, self._clock.now())
        if self.replicas is not None:
            self.replicas.ended(active.id)
        self.look_again()

    def _wait(self, due: float | None) -> None:
        """One timer, for the earliest moment that is of interest."""
        if due is None or (self._due is not None and self._due <= due):
            return
        if self._stop_timer is not None:
            self._stop_timer()
        self._due = due
        self._stop_timer = self._clock.call_at(due, self._wake)

    def _wake(self) -> None:
        self._stop_timer = self._due = None
        if len(self.placement):
            self._arm()


def _give_back(decided: asyncio.Future[Decision]) -> None:
    """Nobody will come for that place any more."""
    if decided.done() and not decided.cancelled() and decided.exception() is None:
        ticket = decided.result().ticket
        if ticket is not None:
            ticket.end()
