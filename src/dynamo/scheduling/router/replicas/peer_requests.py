"""Requests that other routers placed, applied to this router's worker states."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from dynamo.core.clock import Clock
from dynamo.core.hashing import unpack_hashes
from dynamo.scheduling.router.placement.solver import PlacementSolver
from dynamo.scheduling.router.replicas.routing_events import RequestRouted
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.prompt import Prompt
from dynamo.scheduling.workers.worker import WorkerState


class PeerRequests:
    """Apply the requests of other routers to a solver's worker states, cost and cache view.
    `on_change` is called when a worker may have become free."""

    def __init__(
        self, solver: PlacementSolver, clock: Clock, on_change: Callable[[], None]
    ) -> None:
        self._solver = solver
        self._clock = clock
        self._on_change = on_change
        self._active: defaultdict[str, dict[str, PlacedRequest]] = defaultdict(dict)
        self._reserved: dict[str, PlacedRequest] = {}

    def reserve(self, placed: PlacedRequest) -> None:
        """Keep a request that was placed for a peer until the peer publishes it."""
        before = self._reserved.pop(placed.id, None)
        if before is not None:
            self._end(before)
        self._reserved[placed.id] = placed

    @property
    def reserved_count(self) -> int:
        """The number of reservations that no peer has claimed yet."""
        return len(self._reserved)

    def expire_reservations(self, before: float) -> None:
        """End the reservations made before a time; their peers did not claim them."""
        expired = [placed for placed in self._reserved.values() if placed.placed_s < before]
        for placed in expired:
            del self._reserved[placed.id]
            placed.updates_model = False
            self._end(placed)

    def on_routed(self, peer: str, event: RequestRouted) -> None:
        """Add a peer's request, or claim its reservation. Unknown workers are ignored."""
        if event.request_key in self._active[peer]:
            return
        placed = self._reserved.pop(event.request_key, None)
        names = event.prefill or event.worker, event.worker
        if placed is not None and _worker_names(placed) == names:
            self._active[peer][event.request_key] = placed
            return
        if placed is not None:
            self._end(placed)
        worker = self._solver.worker_states.get(event.worker)
        if worker is None:
            return
        now = self._clock.now()
        prompt = Prompt(event.prompt_tokens, unpack_hashes(event.hashes))
        placed = PlacedRequest(f"{peer}/{event.request_key}", worker, prompt, event.new_tokens, now)
        placed.load_ms = event.load_ms
        self._active[peer][event.request_key] = placed
        if event.first_token_emitted:
            placed.emitted = event.emitted
            worker.add_decoding(placed, now)
        else:
            self._place(placed, self._solver.worker_states.get(event.prefill), now)
        self._solver.cost.on_placed(placed)

    def on_first_token(self, peer: str, request_key: str) -> None:
        """Note that a peer's request has its first token."""
        placed = self._active[peer].get(request_key)
        if placed is not None:
            self._solver.on_first_token(placed, self._clock.now())
            self._on_change()

    def on_tokens(self, peer: str, emitted: dict[str, int]) -> None:
        """Update the number of emitted tokens by request key."""
        active = self._active[peer]
        for request_key, count in emitted.items():
            if request_key in active:
                active[request_key].emitted = count

    def on_ended(self, peer: str, request_key: str, emitted: int) -> None:
        """Remove a peer's request."""
        placed = self._active[peer].pop(request_key, None)
        if placed is not None:
            placed.emitted = emitted
            self._end(placed)

    def remove_peer(self, peer: str) -> None:
        """Remove all requests of a peer that is gone or sends its state again."""
        for placed in self._active.pop(peer, {}).values():
            placed.updates_model = False
            self._end(placed)

    def _place(self, placed: PlacedRequest, prefill: WorkerState | None, now: float) -> None:
        """Add a prompt to its worker, or to the worker `prefill` that computes it."""
        worker, view = placed.worker, self._solver.view
        if prefill is None:
            worker.place(placed, now)
        else:
            placed.worker = prefill
            prefill.place(placed, now)
            prefill.expect_answer(placed, worker)
            view.on_request_routed(prefill.name, placed.hashes)
        view.on_request_routed(worker.name, placed.hashes)

    def _end(self, placed: PlacedRequest) -> None:
        self._solver.on_ended(placed, self._clock.now())
        self._on_change()


def _worker_names(placed: PlacedRequest) -> tuple[str, str]:
    """Return the names of the workers that compute the prompt and the answer."""
    prefill = placed.worker.name
    return prefill, prefill if placed.decode_worker is None else placed.decode_worker.name
