"""Books what other routers send out as if it were one's own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from dynamo.core.clock import Clock
from dynamo.core.hashing import unpack_hashes
from dynamo.scheduling.router.placing.fleet import Active
from dynamo.scheduling.router.placing.placement import Placement
from dynamo.scheduling.router.prompt import Prompt
from dynamo.scheduling.router.replicas.moves import Routed


class BookFollower:
    """Keeps a placement's fleet and view in step with the other routers. `changed`: called when a
    worker may have become freer."""

    def __init__(self, placement: Placement, clock: Clock, changed: Callable[[], None]) -> None:
        self._placement = placement
        self._clock = clock
        self._changed = changed
        self._active: defaultdict[str, dict[str, Active]] = defaultdict(dict)
        self._promised: dict[str, Active] = {}

    def promise(self, active: Active) -> None:
        """A peer that asked for this place will say that it took it."""
        before = self._promised.pop(active.id, None)
        if before is not None:
            self._end(before)
        self._promised[active.id] = active

    @property
    def promised(self) -> int:
        """Places that nobody has taken yet."""
        return len(self._promised)

    def give_back(self, before: float) -> None:
        """Places promised before a moment will not be taken any more."""
        late = [one for one in self._promised.values() if one.placed_s < before]
        for active in late:
            del self._promised[active.id]
            active.observed = False
            self._end(active)

    def routed(self, peer: str, move: Routed) -> None:
        """Another router's request is at a worker; one that is not known here is left out."""
        if move.name in self._active[peer]:
            return
        active = self._promised.pop(move.name, None)
        if active is not None and active.book.name == move.worker:
            self._active[peer][move.name] = active
            return
        if active is not None:
            self._end(active)
        book = self._placement.fleet.get(move.worker)
        if book is None:
            return
        now = self._clock.now()
        prompt = Prompt(move.prompt_tokens, unpack_hashes(move.hashes))
        active = Active(f"{peer}/{move.name}", book, prompt, move.new_tokens, now)
        self._active[peer][move.name] = active
        if move.first:
            book.join(active, move.emitted, now)
        else:
            book.place(active, now)
            self._placement.view.routed(book.name, prompt.hashes)
        self._placement.cost.placed(active)

    def first_token(self, peer: str, name: str) -> None:
        """Its prompt is computed."""
        active = self._active[peer].get(name)
        if active is not None:
            self._placement.first_token(active, self._clock.now())
            self._changed()

    def emitted(self, peer: str, counts: dict[str, int]) -> None:
        """How far answers are."""
        active = self._active[peer]
        for name, count in counts.items():
            if name in active:
                active[name].emitted = count

    def ended(self, peer: str, name: str, emitted: int) -> None:
        """It left."""
        active = self._active[peer].pop(name, None)
        if active is not None:
            active.emitted = emitted
            self._end(active)

    def forget(self, peer: str) -> None:
        """That router is gone, and its requests with it; or it will say all anew."""
        for active in self._active.pop(peer, {}).values():
            active.observed = False
            self._end(active)

    def _end(self, active: Active) -> None:
        self._placement.ended(active, self._clock.now())
        self._changed()
