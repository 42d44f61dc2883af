"""The ledger of requests at workers: an attempt is placed, has its first token, and ends.

The ledger writes these three lines, each once. Admission, the costs, the load balancing of basic
modes, health, other routers and reports read what it has written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import DynamoError
from dynamo.core.values import Load, Started
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.prompt import Prompt
from dynamo.scheduling.workers.worker import WorkerState
from dynamo.scheduling.workers.workers import WorkerStates

DECODE_SAMPLE_EVERY = 8
"""Where answers are not followed, every n-th one updates the time per token of its worker."""

NOT_SENT = DynamoError("the request was not sent to the worker that was chosen for it")
"""How an entry ends whose request never left."""

OnPlaced = Callable[[PlacedRequest], None]
OnEnded = Callable[[PlacedRequest, BaseException | None], None]


class Ledger:
    """The requests at the workers of one model, as this process knows them.

    `requests` are the attempts of this process by key, `peers` those of other routers by router and
    key. A request is at one worker, and until its first token expected at one other at most.
    `on_placed`, `on_started`, `on_first_token` and `on_ended` are called after each line.

    `models_prompts`: the workers' models follow prompts, which predicts first tokens.
    `counts_tokens`: the tokens of answers are counted. `follows_answers`: a policy reads the models
    and refreshes them. Each costs time for each request, and is off where nothing reads it.
    `reserves`: this is a router process,
    whose entries are reservations until a peer claims them.
    """

    def __init__(self, clock: Clock | None = None, *clients: Client) -> None:
        """The workers are the instances of `clients`, for which the ledger counts requests."""
        self._clock = clock or SystemClock()
        self._clients = clients
        self.workers = WorkerStates()
        self.requests: dict[str, PlacedRequest] = {}
        self.peers: defaultdict[str, dict[str, PlacedRequest]] = defaultdict(dict)
        self.models_prompts = False
        self.follows_answers = False
        self.counts_tokens = False
        self.reserves = False
        self.on_placed: list[OnPlaced] = []
        self.on_started: list[Callable[[PlacedRequest, Started], None]] = []
        self.on_first_token: list[OnPlaced] = []
        self.on_ended: list[OnEnded] = []
        self._ended_count = 0
        self._stop_listening = [client.on_change(self._on_instances_changed) for client in clients]
        for client in clients:
            client.count_by(self.workers.count)
        self._on_instances_changed()

    def follow_answers(self) -> None:
        """Let the workers' models follow prompts and answers, for a policy that refreshes them."""
        self.models_prompts = self.follows_answers = self.counts_tokens = True

    def close(self) -> None:
        """Stop following the instances."""
        for stop in self._stop_listening:
            stop()

    def place(
        self,
        key: str,
        worker: WorkerState,
        prompt: Prompt,
        prefill: WorkerState | None = None,
        *,
        new_tokens: int,
        max_tokens: int = 0,
        load_ms: float = 0.0,
        now: float | None = None,
        peer: str = "",
        emitted: int | None = None,
    ) -> PlacedRequest:
        """Enter an attempt that `worker` answers, and whose prompt `prefill` computes if that is
        another one. `now`: the time of the choice, if it was made before this call. A key that is
        in use gets a suffix; in a router process, its reservation ends. `peer`: the router that
        made the attempt, if another one, which may have `emitted` its first tokens."""
        # Entries of peers have the peer in their names and may repeat own keys.
        while key in self.requests and not peer:
            if self.reserves:
                self.end(self.requests[key], NOT_SENT)
            else:
                key += "+"
        if now is None:
            now = self._clock.now()
        if self.models_prompts and not (self.follows_answers or peer):
            self.workers.refresh_next(now)
        # `at` computes the prompt; `target` is the decode worker until it has the first token.
        name, at, target = f"{peer}/{key}" if peer else key, worker, None
        if prefill is not None and prefill is not worker and emitted is None:
            at, target = prefill, worker
        placed = PlacedRequest(name, at, target, prompt, new_tokens, max_tokens, now, peer)
        placed.load_ms = load_ms
        at.active[name] = placed
        if target is not None:
            target.arriving[name] = placed
        if emitted is not None:
            placed.emitted, placed.first_token_s = emitted, now
        if self.models_prompts:
            at.place(placed, now)
        if peer:
            self.peers[peer][key] = placed
        else:
            self.requests[key] = placed
            self._occupy_slot(placed, worker)
        for notify in self.on_placed:
            notify(placed)
        return placed

    def _occupy_slot(self, placed: PlacedRequest, worker: WorkerState) -> None:
        instance, slots = worker.instance, worker.slots
        placed.load = slots.occupied if worker.rank is None else self.workers.count(instance.id)
        slots.occupied += 1
        if slots.occupied > slots.peak:
            slots.peak = slots.occupied
        placed.worker.prompts += worker is not placed.worker

    def claim(self, peer: str, key: str, names: tuple[str, str]) -> bool:
        """Make the reservation with this key a request of `peer`, if it is for the workers of these
        names, that of the prompt first; else end it."""
        placed = self.requests.get(key) if self.reserves else None
        if placed is None:
            return False
        if (placed.prompt_worker.name, placed.answering.name) != names:
            self.end(placed, NOT_SENT)
            return False
        worker, target = placed.worker, placed.decode_worker
        del self.requests[key]
        (target or worker).slots.occupied -= 1
        worker.prompts -= target is not None
        placed.peer, self.peers[peer][key] = peer, placed
        name = f"{peer}/{key}"
        worker.active[name] = worker.active.pop(key)
        if target is not None:
            target.arriving[name] = target.arriving.pop(key)
        placed.key = name
        return True

    def expire(self, before: float) -> None:
        """End the reservations that were made before a time and not claimed."""
        for placed in tuple(self.requests.values()):
            if placed.placed_s < before:
                placed.updates_model = False
                self.end(placed, NOT_SENT)

    def first_token(self, placed: PlacedRequest) -> None:
        """Enter that the prompt is computed. The request moves to the worker that answers."""
        if placed.first_token_s is not None or not placed.open:
            return
        worker, target = placed.worker, placed.decode_worker
        now = placed.first_token_s = self._clock.now()
        if placed.counted:
            worker.on_first_token(placed, now)
        if target is not None:
            if placed.counted:
                worker.hand_over(placed, target)
            key = placed.key
            del worker.active[key], target.arriving[key]
            target.active[key] = placed
            placed.worker, placed.decode_worker = target, None
            if not placed.peer:
                worker.prompts -= 1
            self.workers.forget(worker)
        for notify in self.on_first_token:
            notify(placed)

    def end(self, placed: PlacedRequest, error: BaseException | None) -> None:
        """Enter that the attempt has left its workers; `error` is None on success. Later calls are
        ignored."""
        if not placed.open:
            return
        placed.open = False
        worker, target, now = placed.worker, placed.decode_worker, self._clock.now()
        placed.ended_s = now
        if placed.peer:
            del self.peers[placed.peer][placed.key.removeprefix(f"{placed.peer}/")]
        else:  # as in `claim`, without a call
            del self.requests[placed.key]
            (target or worker).slots.occupied -= 1
            worker.prompts -= target is not None
        del worker.active[placed.key]
        if target is not None:
            del target.arriving[placed.key]
        if placed.counted:
            if not self.follows_answers:
                self._sample_answer(placed)
            worker.remove(placed, now)
        for notify in self.on_ended:
            notify(placed, error)
        for each in (worker, target):
            if each is not None and not each.live:
                self.workers.forget(each)

    def end_peer(self, peer: str) -> None:
        """End all requests of a router that is gone or sends its state again."""
        for placed in tuple(self.peers.get(peer, {}).values()):
            placed.updates_model = False
            self.end(placed, None)
        self.peers.pop(peer, None)

    def on_load_report(self, instance: str, load: Load, now: float) -> None:
        """Estimate the requests of others and the times of steps from a load report (a
        `LoadListener`)."""
        for worker, part in self.workers.split_load(instance, load):
            worker.slots.on_load_report(part, now)
            if part.timing:
                worker.start_from(part.timing)

    def _sample_answer(self, placed: PlacedRequest) -> None:
        """Let every n-th answer update the time per token."""
        self._ended_count += 1
        if not self._ended_count % DECODE_SAMPLE_EVERY:
            placed.emitted = placed.output_tokens

    def _on_instances_changed(self) -> None:
        instances: dict[str, Instance] = {}
        for client in self._clients:
            instances.update(client.instances)
        self.workers.update_instances(instances)
