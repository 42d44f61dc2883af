"""The first operator: takes a request whose promise can be kept, and holds it until a worker has a
place for it; turns it away at once otherwise.

Workers get no more than they have places for, so that whoever waits can still go to the worker that
becomes free first, whatever the router's mode is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

from msgspec.structs import replace

from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.errors import NoWorkers, Overloaded
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.reply import Operator, Reply, Send
from dynamo.core.values import GenerateRequest, Load
from dynamo.runtime.client import Client
from dynamo.scheduling.admission.attendance import Attendance
from dynamo.scheduling.admission.places import Places
from dynamo.scheduling.admission.promise import Promise
from dynamo.scheduling.admission.ticket import Ticket, Turns
from dynamo.scheduling.router.attempt import Follow
from dynamo.scheduling.router.kv import KvPolicy
from dynamo.scheduling.router.labels import barred
from dynamo.scheduling.router.placing.fleet import Fleet
from dynamo.scheduling.router.placing.waiting import Rank, WaitingQueue
from dynamo.scheduling.router.policy import Policy
from dynamo.telemetry import Registry

RELAXED_S = 30.0
"""No prefill is weighed against a limit beyond this."""
LOOK_AGAIN_S = 0.25
"""While requests wait, places are counted anew so often, whatever was reported or not."""
RECOVERY_S = 30.0
"""Who waits already does so for so long when there is no worker any more."""
RESERVE = 0.05
"""Of a promised first token's time, for the way to the client."""
PATIENCE = 2.0
"""Who waits longer than predicted, without a promise, goes after so many times the limit."""
LONGEST_RETRY_S = 60.0
LOOKED_AT = 32
"""So many that wait are looked at for one that may go."""
WAITS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Admission(Operator):
    """Before everything that may send a request more than once: what was let in is not asked
    again. Its `follow` is for the router: who is with a worker is known by that."""

    def __init__(
        self,
        client: Client,
        policy: Policy | None,
        clock: Clock,
        promise: Promise | None = None,
        metrics: Registry | None = None,
    ) -> None:
        self.promise = promise or Promise()
        self._promised_s = inf
        self._client = client
        self._clock = clock
        self.places = Places(self.promise.worker_cap, clock.now)
        kept = policy.placement.fleet if isinstance(policy, KvPolicy) else None
        self._fleet = kept or Fleet()
        self._alone = kept is None
        self._attendance = Attendance(clock, self.places, self._fleet)
        self.follow: Follow = self._attendance.follow
        self._attendance.on_left = self._release
        self._attendance.on_came = self._came
        self._queue: WaitingQueue[Ticket] = WaitingQueue(self.promise.order, self.promise.bound)
        self._between: dict[int, Ticket | None] = {}
        self._count = 0
        self._told_s = 0.0
        self._turns = Turns()
        self._alone_s: float | None = None
        self._stop_looking: Callable[[], None] | None = None
        self._declare(metrics or Registry())
        self._stop_listening = client.on_change(self._announced)
        self.keep_to(self.promise)

    def _declare(self, registry: Registry) -> None:
        self._waiting = registry.gauge(
            "dynamo_admission_waiting_requests", "Requests that wait for a place at a worker"
        )
        self._waited = registry.histogram(
            "dynamo_admission_wait_seconds", "Waiting for a place, of those that waited", WAITS
        )
        self._rejected = registry.counter(
            "dynamo_admission_rejected_total",
            "Requests turned away because what was promised could not be kept",
            ("reason",),
        )

    def keep_to(self, promise: Promise) -> None:
        """This holds from now on, but for `order` and `bound`, which are those of the beginning.
        Who waits already has the old one."""
        self.promise = promise
        self._promised_s = promise.ttft_s * (1 - RESERVE)
        self.places.cap = promise.worker_cap
        self._attendance.keeps = self._alone and promise.ttft_s < inf
        self._announced()

    def close(self) -> None:
        """Follow the workers no more. Who waits goes on."""
        self._stop_listening()

    def reported(self, worker: str, load: Load, now: float) -> None:
        """A worker's own word about its load."""
        self.places.reported(worker, load, now)
        if len(self._queue):
            self._release()

    async def send(
        self, request: GenerateRequest, context: Context, reply: Reply, onward: Send
    ) -> None:
        """Raises `Overloaded` where the request is not taken, saying when it might be."""
        ticket = None if self._open_to(context) else self._enter(request, context)
        if ticket is None or ticket.turn is None:
            self._between[id(request)] = ticket
        else:
            await self._wait(ticket, ticket.turn)
        try:
            full = self.places.full if self.places.free else None
            if not full:
                return await onward(request, context, reply)
            try:  # any worker that has a place; where those are gone, any
                await onward(request, replace(context, avoid=(*context.avoid, *full)), reply)
            except NoWorkers:
                await onward(request, context, reply)
        finally:
            if id(request) in self._between:
                del self._between[id(request)]
                self._release()

    def _open_to(self, context: Context) -> bool:
        """Nobody waits, any worker will do, there is a place, and a prefill is no matter."""
        if context.metadata or self.places.free <= len(self._between) or len(self._queue):
            return False
        limit_s = context.timeout_s
        return self._promised_s >= RELAXED_S and (limit_s is None or limit_s >= RELAXED_S)

    def _enter(self, request: GenerateRequest, context: Context) -> Ticket:
        """Let in: at once where it has no `turn` to wait for. Raises `Overloaded`."""
        limit_s = self._promised_s
        if context.timeout_s is not None and context.timeout_s < limit_s:
            limit_s = context.timeout_s
        ticket = Ticket(request, self._clock.now(), limit_s)
        if context.metadata:
            ticket.barred = barred(self._client.instances, context)
        if not self._client.instances:
            return ticket  # the router knows what to say
        prompt, between = len(request.token_ids) // TOKEN_BYTES, len(self._between)
        if len(self._queue) or not self._has_place(ticket):
            ticket.prefill_s = self._attendance.prefill_s(prompt, between)
            self._join(ticket, prompt)
        elif limit_s < RELAXED_S and (ticket.barred or self.places.idle <= between):
            self._weigh(ticket, 0.0, self._attendance.prefill_s(prompt, between, limit_s))
        return ticket

    def _join(self, ticket: Ticket, prompt: int) -> None:
        """Queue, or be turned away."""
        request, now = ticket.request, ticket.arrived_s
        rank = Rank(now, prompt, request.priority, now + ticket.limit_s)
        ahead = self._queue.ahead(rank) + len(self._between)
        wait_s = self.places.wait_s(ahead, request.stops.max_tokens)
        if self.places.shared:
            wait_s = max(wait_s, self._turns.wait_s(ahead))
        margin_s = min(self._attendance.margin_s(), ticket.limit_s / 2)
        predicted_s = wait_s + ticket.prefill_s
        self._weigh(ticket, wait_s, predicted_s + margin_s)
        ticket.predicted_s = now + predicted_s
        self._count += 1
        ticket.name = str(self._count)
        try:
            self._queue.push(ticket.name, ticket, rank)
        except Overloaded:
            self._rejected.labels("queue_full").inc()
            raise
        ticket.turn = asyncio.get_running_loop().create_future()
        if self._promised_s < inf:
            at = now + self._promised_s - ticket.prefill_s
        else:
            at = now + self.promise.queue_wait_s * PATIENCE
        ticket.stop_timer = self._clock.call_at(at, lambda: self._shed(ticket))
        self._waiting.inc()
        self._look_later()

    def _weigh(self, ticket: Ticket, wait_s: float, first_token_s: float) -> None:
        """Raises `Overloaded` where a promise would be broken and no worker is idle."""
        limit_s = ticket.limit_s
        if first_token_s > limit_s:
            over_s = first_token_s - limit_s
        elif self.promise.ttft_s == inf and wait_s > self.promise.queue_wait_s:
            over_s = wait_s - self.promise.queue_wait_s
        else:
            return
        if self.places.anybody_idle(ticket.barred):
            return
        if first_token_s <= limit_s:
            reason, limit_s = "queue_wait", self.promise.queue_wait_s
            hint = "router.max_queue_wait is the limit; more workers would take it"
        elif limit_s < self._promised_s:
            reason, hint = "deadline", "the request's own time is the limit"
        else:
            reason, hint = "ttft", "router.ttft_slo is the promise; more workers would keep it"
        self._rejected.labels(reason).inc()
        bound = ticket.request.stops.max_tokens
        raise Overloaded(
            f"a first token is expected in {first_token_s:.2f} s, which is beyond {limit_s:g} s",
            hint=hint,
            retry_after_s=self._retry_s(over_s, bound),
        )

    def _retry_s(self, over_s: float, bound: int) -> float:
        """In how long it should come again: those turned away are told one after the other, as
        places become free, so that they do not all come back at once."""
        now = self._clock.now()
        self._told_s = max(now + over_s, self._told_s + self.places.gap_s(bound))
        self._told_s = min(self._told_s, now + LONGEST_RETRY_S)
        return self._told_s - now

    async def _wait(self, ticket: Ticket, turn: asyncio.Future[None]) -> None:
        try:
            await turn
        except BaseException:
            if self._queue.pop(ticket.name) is None:
                self._between.pop(id(ticket.request), None)
                self._release()
            raise
        finally:
            self._waiting.dec()
            self._waited.observe(self._clock.now() - ticket.arrived_s)
            if ticket.stop_timer is not None:
                ticket.stop_timer()

    def _shed(self, ticket: Ticket) -> None:
        """Its time has come, but no place: what was predicted did not happen."""
        turn = ticket.turn
        if turn is None or turn.done() or self._queue.pop(ticket.name) is None:
            return
        self._rejected.labels("late").inc()
        if ticket.predicted_s is not None:
            self._attendance.told(ticket.predicted_s, self._clock.now() + ticket.prefill_s)
        waited_s = self._clock.now() - ticket.arrived_s
        turn.set_exception(
            Overloaded(
                f"no worker became free in {waited_s:.3g} s",
                hint="router.ttft_slo and router.max_queue_wait are the limits; more workers would "
                "keep them",
                retry_after_s=self._retry_s(0.0, ticket.request.stops.max_tokens),
            )
        )

    def _release(self) -> None:
        """Whoever is first goes as long as there are places."""
        while len(self._queue) and self.places.free > len(self._between):
            for ticket in self._queue.in_order(self._clock.now(), LOOKED_AT):
                if self._has_place(ticket):
                    break
            else:
                return
            self._queue.pop(ticket.name, self._clock.now())
            self._between[id(ticket.request)] = ticket
            self.places.granted(ticket.request.stops.max_tokens)
            self._turns.granted(self._clock.now(), len(self._queue))
            if ticket.turn is not None and not ticket.turn.done():
                ticket.turn.set_result(None)

    def _has_place(self, ticket: Ticket) -> bool:
        taken = len(self._between)
        if not ticket.barred:
            return self.places.free > taken
        desks = self.places.desks.items()
        return sum(desk.open for name, desk in desks if name not in ticket.barred) > taken

    def _came(self, request: GenerateRequest) -> float | None:
        ticket = self._between.pop(id(request), None)
        return ticket.predicted_s if ticket is not None else None

    def _announced(self) -> None:
        live = self._client.instances
        if self._alone:
            self._fleet.replace(live if self._attendance.keeps else {})
        self.places.announced(live, {book.name: book for book in self._fleet.books})
        if live:
            self._alone_s = None
        elif self._alone_s is None:
            self._alone_s = self._clock.now()
        self._release()

    def _give_up(self) -> None:
        """No worker has come for long: the router knows what to say."""
        for ticket in self._queue.in_order(self._clock.now()):
            self._queue.pop(ticket.name)
            if ticket.turn is not None and not ticket.turn.done():
                ticket.turn.set_result(None)

    def _look_later(self) -> None:
        if self._stop_looking is None:
            self._stop_looking = self._clock.call_at(
                self._clock.now() + LOOK_AGAIN_S, self._look_again
            )

    def _look_again(self) -> None:
        self._stop_looking = None
        alone_s = self._alone_s
        if alone_s is not None and self._clock.now() - alone_s >= RECOVERY_S:
            self._give_up()
        if len(self._queue):
            self.places.recount()
            self._release()
            self._look_later()
