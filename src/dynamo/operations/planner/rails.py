"""The rails of the planner: what no policy may do, whatever it wants."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from dynamo.core.settings.schema_planner import PlannerSettings
from dynamo.operations.planner.values import KindState, Observation, Order, ScaleDecision

CONFIRM_S = 60.0
"""An order that the observed sizes do not show after this time was lost."""
RETRY_S = 60.0
"""A kind whose order failed is left alone for this time."""
TURN_WINDOW_S, MAX_TURNS = 600.0, 4
"""A size changes its direction at most so often in this time."""
MAX_STEP = 8
"""A kind at most doubles at once, or grows by so many."""


class _Track:
    """The orders of one kind, and what came of them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.number = 0
        self.ordered_s = -1e18
        self.confirmed = True
        self.failed_count = -1
        """The size of an order whose answer was an error; it may be carried out all the same."""
        self.grows = False
        self.ready = 0
        self.pending_s: float | None = None
        """When the workers that start were ordered, or one of them was ready last."""
        self.hands_s = self.blocked_s = -1e18
        self.blocked_why = ""
        self.turns_s: deque[float] = deque()
        """When orders changed the direction of the size."""

    def held(self, state: KindState, now: float) -> int:
        """Return the workers that hold GPUs, or may soon by an order that no figure shows yet."""
        ordered = self.failed_count if self.blocked_s > now else self.count
        return max(state.held, max(ordered, self.count) + state.draining)


class Rails:
    """Turns wanted sizes into orders. The state follows from observations and earlier decisions:
    `resume` restores it after a restart."""

    def __init__(self, settings: PlannerSettings) -> None:
        self.settings = settings
        self._tracks: dict[str, _Track] = {}
        self._next_number = 1

    def resume(self, decisions: Iterable[ScaleDecision]) -> None:
        """Take over the orders of earlier decisions, oldest first."""
        for decision in decisions:
            for kind, state in decision.kinds.items():
                self._tracks.setdefault(kind, _Track(state.wanted))
                self._follow(kind, state, decision.now_s)
            for order in decision.orders:
                self._register(order, decision.now_s)

    def follow(self, observation: Observation) -> list[str]:
        """Compare the sizes with the orders. Returns what came of these."""
        outcome = []
        for kind, state in observation.kinds.items():
            if kind not in self._tracks:
                self._tracks[kind] = _Track(state.wanted)
            if text := self._follow(kind, state, observation.now_s):
                outcome.append(text)
        return outcome

    def on_failed(self, order: Order, reason: str, now: float) -> None:
        """Leave a kind alone for a while, because its order failed."""
        for kind in filter(None, (order.kind, order.takes_from)):
            track = self._tracks[kind]
            track.failed_count, track.confirmed, track.ordered_s = track.count, True, now
            track.count = -1
            track.blocked_s, track.blocked_why = now + RETRY_S, f"its last order failed: {reason}"

    def constrain(
        self, observation: Observation, wanted: Mapping[str, int], why: Mapping[str, str]
    ) -> tuple[list[Order], dict[str, str]]:
        """Return the orders that bring the kinds to the wanted sizes as far as the rails allow, and
        by kind the rail that bound. Call after `follow`."""
        bound: dict[str, str] = {}
        targets = {}
        for kind, state in observation.kinds.items():
            size = wanted.get(kind)
            targets[kind] = state.wanted
            if size is not None:
                targets[kind] = self._limit(kind, state, size, observation.now_s, bound)
            self._withdraw(kind, state, targets, observation.now_s, bound)
        turns = self._turn_roles(observation.kinds, targets)
        self._keep_budget(observation, targets, turns, bound)
        return self._make_orders(observation, targets, turns, why, bound), bound

    def _follow(self, kind: str, state: KindState, now: float) -> str:
        track, text = self._tracks[kind], ""
        if track.count < 0:  # an order failed: what is there counts
            track.count = state.wanted
        elif not track.confirmed:
            if state.wanted == track.count:
                track.confirmed = True
                text = f"order {track.number} was carried out: {kind} is to be {track.count}"
            elif now - track.ordered_s > CONFIRM_S:
                text = f"order {track.number} was not carried out: {kind} is {state.wanted}"
                track.confirmed, track.count = True, state.wanted
                track.blocked_s, track.blocked_why = now + RETRY_S, "its last order was lost"
        elif state.wanted != track.count:
            text = self._on_other_size(kind, track, state, now)
        if state.ready > track.ready or state.wanted <= state.ready or not state.starting:
            track.pending_s = None
        if state.starting and track.pending_s is None:
            track.pending_s = now
        track.ready = state.ready
        return text

    def _on_other_size(self, kind: str, track: _Track, state: KindState, now: float) -> str:
        """Find out why a size is not the one that was ordered last."""
        before, track.count = track.count, state.wanted
        if state.wanted == track.failed_count:
            track.failed_count = -1
            return f"order {track.number} was carried out late: {kind} is {state.wanted}"
        if track.grows and state.wanted < before and track.ready < before:
            self._block(track, now, "its last start failed")
            return f"{before - state.wanted} workers of {kind} did not start"
        track.hands_s = now + self.settings.hold_s
        return f"somebody changed {kind} from {before} to {state.wanted}"

    def _limit(
        self, kind: str, state: KindState, size: int, now: float, bound: dict[str, str]
    ) -> int:
        """Return the size within the rails of one kind."""
        settings, track, present = self.settings, self._tracks[kind], state.wanted
        if track.hands_s > now:
            if size != present:
                left = (track.hands_s - now) / 60
                bound[kind] = f"somebody set {present}, which holds for {left:.0f} min more"
            return present
        if not track.confirmed:
            if size != present:
                bound[kind] = f"order {track.number} is not confirmed yet"
            return present
        if size < settings.min:
            size, bound[kind] = settings.min, f"planner.min is {settings.min}"
        if settings.max and size > settings.max:
            size, bound[kind] = settings.max, f"planner.max is {settings.max}"
        reason = ""
        if size > present:
            reason = self._growth_reason(state, track, now)
            most = present + max(MAX_STEP, present)
            if not reason and size > most:
                size, bound[kind] = most, f"a kind grows by {most - present} at once"
        elif size < present and state.wanted <= (settings.max or state.wanted):
            reason = self._shrink_reason(track, now)
        if reason:
            bound[kind] = reason
            return present
        return size

    def _growth_reason(self, state: KindState, track: _Track, now: float) -> str:
        if state.gpus is None and self.settings.budget is not None:
            return "the GPUs of its workers are unknown, and there is a budget"
        if state.failing:
            return f"its workers fail: {state.failing}"
        return track.blocked_why if track.blocked_s > now else ""

    def _shrink_reason(self, track: _Track, now: float) -> str:
        if track.grows and track.ordered_s + self.settings.cooldown > now:
            return f"it grew less than {self.settings.cooldown:.0f} s ago"
        if track.blocked_s > now and track.failed_count >= 0:
            return track.blocked_why
        while track.turns_s and track.turns_s[0] <= now - TURN_WINDOW_S:
            track.turns_s.popleft()
        if track.grows and len(track.turns_s) >= MAX_TURNS - 1:
            return f"its size turned {len(track.turns_s)} times in 10 minutes"
        return ""

    def _withdraw(
        self,
        kind: str,
        state: KindState,
        targets: dict[str, int],
        now: float,
        bound: dict[str, str],
    ) -> None:
        """Take back workers that have been starting for too long."""
        track = self._tracks[kind]
        if track.pending_s is None or now - track.pending_s <= self.settings.start_timeout:
            return
        if state.wanted > state.ready and track.confirmed and track.hands_s <= now:
            waits = state.wanted - state.ready
            bound[kind] = f"{waits} have not started in {now - track.pending_s:.0f} s: withdrawn"
            targets[kind] = state.ready
            self._block(track, now, "its last workers did not start in time")
            track.pending_s = None

    def _block(self, track: _Track, now: float, why: str) -> None:
        seconds = max(self.settings.start_timeout, TURN_WINDOW_S / 2)
        track.blocked_s, track.blocked_why = now + seconds, why

    def _turn_roles(
        self, kinds: Mapping[str, KindState], targets: dict[str, int]
    ) -> dict[str, tuple[str, int]]:
        """Return, by kind that grows, the kind of its pool that gives workers, and how many."""
        turns = {}
        for kind, state in kinds.items():
            for other, others in kinds.items():
                if not state.pool or others.pool != state.pool or kind in turns:
                    continue
                surplus = min(others.wanted - targets[other], others.ready - targets[other])
                count = min(targets[kind] - state.wanted, surplus)
                if count > 0:
                    turns[kind] = other, count
        return turns

    def _keep_budget(
        self,
        observation: Observation,
        targets: dict[str, int],
        turns: Mapping[str, tuple[str, int]],
        bound: dict[str, str],
    ) -> None:
        """Let kinds grow into GPUs that are free now; shrink them where too many are held."""
        budget, kinds, now = self.settings.budget, observation.kinds, observation.now_s
        if budget is None:
            return
        free = budget - sum(
            self._tracks[kind].held(state, now) * (state.gpus or 1) for kind, state in kinds.items()
        )
        turned = {kind: count for kind, (_, count) in turns.items()}
        for kind in sorted(targets, key=lambda name: kinds[name].wanted - targets[name]):
            state, each = kinds[kind], kinds[kind].gpus or 1
            grows = targets[kind] - state.wanted - turned.get(kind, 0)
            if grows <= 0:
                continue
            granted = max(0, min(grows, free // each))
            free -= granted * each
            if granted < grows:
                targets[kind] -= grows - granted
                bound[kind] = f"the budget of {budget} GPUs has no more free now"
        excess = sum(size * (kinds[kind].gpus or 1) for kind, size in targets.items()) - budget
        for kind in sorted(targets, key=targets.__getitem__, reverse=True):
            each = kinds[kind].gpus or 1
            less = min(targets[kind], max(0, -(-excess // each)))
            if less:
                targets[kind] -= less
                excess -= less * each
                bound[kind] = f"the budget is {budget} GPUs"

    def _make_orders(
        self,
        observation: Observation,
        targets: Mapping[str, int],
        turns: Mapping[str, tuple[str, int]],
        why: Mapping[str, str],
        bound: Mapping[str, str],
    ) -> list[Order]:
        orders: list[Order] = []
        kinds = observation.kinds
        sizes = {kind: state.wanted for kind, state in kinds.items()}

        def add(kind: str, count: int, takes_from: str = "") -> None:
            reason = bound.get(kind) or why.get(kind, "")
            number = max(self._next_number, int(observation.now_s))  # new without a memory, too
            orders.append(Order(number, kind, count, reason, takes_from))
            self._register(orders[-1], observation.now_s)

        for kind, (source, count) in turns.items():
            if count <= targets[kind] - sizes[kind]:
                add(kind, sizes[kind] + count, source)
                sizes[kind] += count
                sizes[source] -= count
        smaller = [kind for kind in targets if targets[kind] < sizes[kind]]
        larger = [kind for kind in targets if targets[kind] > sizes[kind]]
        for kind in (*smaller, *larger):
            add(kind, targets[kind])
        return orders

    def _register(self, order: Order, now: float) -> None:
        """Remember an order as given."""
        self._next_number = max(self._next_number, order.number + 1)
        before = self._tracks[order.kind].count
        self._set(order.kind, order.count, order.number, now)
        if order.takes_from:
            source = self._tracks[order.takes_from]
            count = source.count - (order.count - before)
            self._set(order.takes_from, count, order.number, now)

    def _set(self, kind: str, count: int, number: int, now: float) -> None:
        track = self._tracks[kind]
        grows = count > track.count
        if track.number and grows != track.grows:
            track.turns_s.append(now)
        track.count, track.number, track.ordered_s = count, number, now
        track.confirmed, track.grows, track.failed_count = False, grows, -1
        track.pending_s = None
