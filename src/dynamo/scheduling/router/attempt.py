"""An attempt of a request at one worker, and the choice of a data-parallel rank for it."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Container, Sequence
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from dynamo.core.clock import Clock
from dynamo.core.fast_path import SendToken
from dynamo.core.kv_events import worker_name
from dynamo.core.reply import LogprobsPerToken, Reply
from dynamo.core.text import TextPart
from dynamo.core.values import Finish, Started
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.router.policy import Outcome
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.workers import NO_RANKS, WorkerStates, data_parallel_ranks


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
    counts tokens, they are counted in the reply's token log; without a log, by each call."""

    __slots__ = (
        "_clock",
        "_counts_tokens",
        "_ledger",
        "_prefill",
        "_reply",
        "_tokens",
        "cached_tokens",
        "ended_by_token",
        "placed",
    )

    def __init__(
        self, reply: Reply, placed: PlacedRequest, ledger: Ledger, clock: Clock, prefill: str = ""
    ) -> None:
        """`prefill`: the instance that computes the prompt, if another one."""
        self._reply = reply
        self._prefill = prefill
        self._tokens = reply.tokens
        self._ledger = ledger
        self._clock = clock
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
        self.placed.output_tokens = end.completion_tokens
        self._reply.finish(end)

    def outcome(self, error: str) -> Outcome:
        """Return the result so far. `error` is an error code, "" on success. The token that ended
        the answer counts as an output token."""
        placed = self.placed
        placed_s, first_s = placed.placed_s, placed.first_token_s
        return Outcome(
            ttft_s=None if first_s is None else first_s - placed_s,
            duration_s=self._clock.now() - placed_s,
            cached_tokens=self.cached_tokens,
            prompt_tokens=placed.prompt_tokens,
            output_tokens=placed.emitted + self.ended_by_token,
            error=error,
            load=placed.load,
        )
