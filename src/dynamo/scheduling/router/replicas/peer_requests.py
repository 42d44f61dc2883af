"""Books what other routers send out as if it were one's own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from dynamo.core.clock import Clock
from dynamo.core.hashing import unpack_hashes
from dynamo.scheduling.router.placement.solver import PlacementSolver
from dynamo.scheduling.router.prompt import Prompt
from dynamo.scheduling.router.replicas.routing_events import RequestRouted
from dynamo.scheduling.router.worker_state import PlacedRequest


class PeerRequests:
    """Keeps a placement's fleet and view in step with the other routers. `changed`: called when a
    worker may have become freer."""

    def __init__(
        self, placement: PlacementSolver, clock: Clock, changed: Callable[[], None]
    ) -> None:
        self._solver = placement
        self._clock = clock
        self._on_change = changed
        self._active: defaultdict[str, dict[str, PlacedRequest]] = defaultdict(dict)
        self._reserved: dict[str, PlacedRequest] = {}

    def reserve(self, active: PlacedRequest) -> None:
        """A peer that asked for this place will say that it took it."""
        before = self._reserved.pop(active.id, None)
        if before is not None:
            self._end(before)
        self._reserved[active.id] = active

    @property
    def reserved_count(self) -> int:
        """Places that nobody has taken yet."""
        return len(self._reserved)

    def expire_reservations(self, before: float) -> None:
        """Places promised before a moment will not be taken any more."""
        late = [one for one in self._reserved.values() if one.placed_s < before]
        for active in late:
            del self._reserved[active.id]
            active.updates_model = False
            self._end(active)

    def on_routed(self, peer: str, move: RequestRouted) -> None:
        """Another router's request is at a worker; one that is not known here is left out."""
        if move.request_key in self._active[peer]:
            return
        active = self._reserved.pop(move.request_key, None)
        if active is not None and active.worker.name == move.worker:
            self._active[peer][move.request_key] = active
            return
        if active is not None:
            self._end(active)
        book = self._solver.worker_states.get(move.worker)
        if book is None:
            return
        now = self._clock.now()
        prompt = Prompt(move.prompt_tokens, unpack_hashes(move.hashes))
        active = PlacedRequest(f"{peer}/{move.request_key}", book, prompt, move.new_tokens, now)
        self._active[peer][move.request_key] = active
        if move.first_token_emitted:
            book.add_decoding(active, move.emitted, now)
        else:
            book.place(active, now)
            self._solver.view.on_request_routed(book.name, prompt.hashes)
        self._solver.cost.on_placed(active)

    def on_first_token(self, peer: str, name: str) -> None:
        """Its prompt is computed."""
        active = self._active[peer].get(name)
        if active is not None:
            self._solver.on_first_token(active, self._clock.now())
            self._on_change()

    def on_tokens(self, peer: str, counts: dict[str, int]) -> None:
        """How far answers are."""
        active = self._active[peer]
        for name, count in counts.items():
            if name in active:
                active[name].emitted = count

    def on_ended(self, peer: str, name: str, emitted: int) -> None:
        """It left."""
        active = self._active[peer].pop(name, None)
        if active is not None:
            active.emitted = emitted
            self._end(active)

    def remove_peer(self, peer: str) -> None:
        """That router is gone, and its requests with it; or it will say all anew."""
        for active in self._active.pop(peer, {}).values():
            active.updates_model = False
            self._end(active)

    def _end(self, active: PlacedRequest) -> None:
        self._solver.on_ended(active, self._clock.now())
        self._on_change()
