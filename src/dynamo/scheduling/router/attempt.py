"""An attempt of a request at one worker, and the choice of a data-parallel rank for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Container, Sequence
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from dynamo.core.errors import error_code
from dynamo.core.fast_path import SendToken
from dynamo.core.kv_events import worker_name
from dynamo.core.reply import LogprobsPerToken, Reply
from dynamo.core.text import TextPart
from dynamo.core.timing.worker_times import WorkerTimes
from dynamo.core.values import Finish, Started
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.router.policy import Decision
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.workers import NO_RANKS, WorkerStates, data_parallel_ranks
from dynamo.telemetry.story import US_PER_S, AttemptFacts

MAX_REASON = 200
"""So much of an error's message is kept for the story of its request."""


class RankBalancer:
    """Chooses the data-parallel rank where a policy has chosen only the instance: the one with the
    fewest requests. Ties go to the next one."""

    def __init__(self, workers: WorkerStates) -> None:
        self._workers = workers
        self._choices: Counter[str] = Counter()

    def choose(self, instance: Instance, excluded: AbstractSet[str]) -> int | None:
        """Return a rank whose name is not `excluded`, or any if all are; None without ranks."""
        ranks = data_parallel_ranks(instance)
        if ranks is NO_RANKS:
            return None
        self._choices[instance.id] += 1
        first = self._choices[instance.id] % len(ranks)
        workers = {worker.rank: worker for worker in self._workers.ranks_of(instance.id)}

        def load(rank: int | None) -> tuple[bool, int]:
            worker = workers.get(rank)
            requests = 0 if worker is None else worker.slots.occupied + worker.prompts
            return worker_name(instance.id, rank) in excluded, requests

        return min((*ranks[first:], *ranks[:first]), key=load)

    def retain(self, instances: Container[str]) -> None:
        """Forget the choices among ranks of other instances."""
        for name in [name for name in self._choices if name not in instances]:
            del self._choices[name]


class Attempt(Reply):
    """Forward one attempt's reply, and enter its first token in the ledger. Where the ledger
    counts tokens, they are counted in the reply's token log; without a log, by each call.

    `choice`, `resumed`: those of the request. `choosing_s`: the router had the request. `error`:
    the code of the error that ended the attempt, for the `reason`. `seen_blocks`: the blocks of the
    prompt that this process has seen, where somebody counts them. `times`: those of the worker."""

    __slots__ = (
        "_counts_tokens",
        "_ledger",
        "_prefill",
        "_reply",
        "_tokens",
        "cached_tokens",
        "choice",
        "choosing_s",
        "decision",
        "ended_by_token",
        "error",
        "placed",
        "reason",
        "resumed",
        "seen_blocks",
        "times",
    )

    def __init__(
        self,
        reply: Reply,
        placed: PlacedRequest,
        ledger: Ledger,
        prefill: str = "",
        decision: Decision | None = None,
    ) -> None:
        """`prefill`: the instance that computes the prompt, if another one."""
        self.decision = decision
        self.choice = self.resumed = 0
        self.choosing_s = placed.placed_s
        self.error = self.reason = ""
        self.seen_blocks: int | None = None
        self.times: WorkerTimes | None = None
        self._reply = reply
        self._prefill = prefill
        self._tokens = reply.tokens
        self._ledger = ledger
        self.placed = placed
        self._counts_tokens = False
        if ledger.counts_tokens:
            token_log = reply.token_log
            self._counts_tokens = token_log is None
            if token_log is not None:
                placed.attach_token_log(token_log)
        self.cached_tokens = 0
        self.ended_by_token = False

    def begin(self, started: Started) -> None:
        self.cached_tokens = started.cached_tokens
        self.times = started.times
        if self._prefill:
            started = replace(started, prefill=self._prefill)
        for notify in self._ledger.on_started:
            notify(self.placed, started)
        self._reply.begin(started)

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        if self.placed.first_token_s is None:
            self._ledger.first_token(self.placed)
        if self._counts_tokens:
            self.placed.emitted += len(ids)
        send = self._tokens  # calling a slot directly is slower in CPython 3.11
        return send(ids, logprobs)

    def text(self, part: TextPart) -> bool:
        if self.placed.first_token_s is None:
            self._ledger.first_token(self.placed)
        if self._counts_tokens:
            self.placed.emitted += 1
        return self._reply.text(part)

    @property
    def token_log(self) -> array[int] | None:
        return self._reply.token_log

    def open_fast_path(self, token_log: array[int] | None = None) -> SendToken | None:
        return None if self._counts_tokens else self._reply.open_fast_path(token_log)

    def finish(self, end: Finish) -> None:
        self.ended_by_token = end.stop_token is not None
        if end.cached_tokens is not None:
            self.cached_tokens = end.cached_tokens
        if end.times is not None:
            self.times = end.times
        self.placed.output_tokens = end.completion_tokens
        self._reply.finish(end)

    def end(self, error: BaseException | None, observers: Sequence[Observer]) -> None:
        """Enter the end of the attempt in the ledger, and tell it to `observers`."""
        if error is not None:
            self.error = error_code(error)
            self.reason = str(error)[:MAX_REASON]
        self._ledger.end(self.placed, error)
        for observer in observers:
            observer.on_attempt_ended(self)

    def facts(self, began_s: float) -> AttemptFacts:
        """Return the facts of an attempt that has ended."""
        placed, decision = self.placed, self.decision
        worker, prompt_worker = (placed.decode_worker or placed.worker).name, ""
        if placed.prompt_worker is not placed.worker or placed.decode_worker is not None:
            prompt_worker = placed.prompt_worker.name
        first_s = placed.first_token_s
        assert decision is not None  # noqa: S101 - the router has set it
        predicted_s = decision.predicted_ttft_s
        return AttemptFacts(
            self.choice,
            worker,
            prompt_worker if prompt_worker != worker else "",
            decision.mode,
            decision.view,
            decision.candidates,
            (self.choosing_s - began_s) * US_PER_S,
            (placed.placed_s - began_s) * US_PER_S,
            None if first_s is None else (first_s - began_s) * US_PER_S,
            (placed.ended_s - began_s) * US_PER_S,
            self.error,
            self.reason,
            self.resumed,
            placed.load,
            decision.queue_length,
            placed.prompt_tokens,
            decision.prompt_blocks,
            decision.overlap_blocks,
            decision.best_overlap_blocks,
            self.seen_blocks,
            self.cached_tokens,
            placed.output_tokens or placed.emitted + self.ended_by_token,
            decision.waited_s * US_PER_S,
            None if predicted_s is None else predicted_s * US_PER_S,
            decision.harm_weight,
            decision.itl_slo_ms,
            self.times,
            decision.cost_table,
            placed.key,
        )


class Observer(ABC):
    """Receives every attempt, with its decision. Calls run on the event loop and must be short."""

    @abstractmethod
    def on_attempt_started(self, attempt: Attempt) -> None:
        """Called after the choice, before the request is sent to the worker."""

    @abstractmethod
    def on_attempt_ended(self, attempt: Attempt) -> None:
        """Called when the request has left that worker."""
