"""The worker states of a large deployment as arrays, one entry for each worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, repeat
from math import inf
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.router.tier_loads import load_delay_ms
from dynamo.scheduling.workers.worker import WorkerState
from dynamo.scheduling.workers.workers import WorkerStates

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

DENSE_OVERLAP_SHARE = 0.2
"""Share of workers with an overlap from which on looking up all workers in order is faster, since
the order of their names follows the order in memory."""


class WorkerArrays:
    """Values of all workers at one time, float64 `[workers]` in the order of `workers`, named as in
    `WorkerState`. Call `refresh` before every use: only the entries of changed workers are written
    again. `fields` are the attributes of `WorkerState` that become arrays."""

    fields: tuple[str, ...] = (
        "token_ms",
        "step_ms",
        "token_budget",
        "stall_sensitivity",
        "prefill_free_s",
        "pending_prefills",
        "pending_prefill_tokens",
    )
    token_ms: Floats
    step_ms: Floats
    token_budget: Floats
    stall_sensitivity: Floats
    prefill_free_s: Floats
    pending_prefills: Floats
    pending_prefill_tokens: Floats
    backlog_ms: Floats
    _last_names: AbstractSet[str]
    _last_indices: Indices

    def __init__(self, states: WorkerStates) -> None:
        self.workers: Sequence[WorkerState] = ()
        self._states = states
        self._now = -inf
        self._index: dict[str, int] = {}
        self._read: Callable[[WorkerState], Sequence[float]] = attrgetter(*self.fields)
        self._ranks: dict[str, list[int]] = {}

    def refresh(self, now: float) -> None:
        """Read the workers that changed, and compute `backlog_ms` for the time `now`."""
        states = self._states
        if states.workers is not self.workers:
            self._rebuild()
        elif states.changed:
            for worker in states.changed:
                index = self._index.get(worker.name)
                if index is not None and self.workers[index] is worker:
                    self._values[:, index] = self._read(worker)
        elif now == self._now:
            return
        states.changed.clear()
        self._now = now
        pending = self.pending_prefills > 0.0
        self.backlog_ms = np.abs(self.prefill_free_s - now) * 1e3 * pending

    def uncached_tokens(
        self, prompt_tokens: int, overlaps: Mapping[str, int], block_tokens: int
    ) -> Floats:
        """Return the prompt tokens that each worker would compute; the last token always."""
        count, size = len(self.workers), len(overlaps)
        if size > count * DENSE_OVERLAP_SHARE:
            blocks = np.fromiter(map(overlaps.get, self._index, repeat(0)), np.float64, count)
            return np.maximum(prompt_tokens - blocks * block_tokens, 1.0)
        tokens = np.full(count + 1, max(1.0, prompt_tokens))
        if size:  # unknown workers write to the entry after the last
            holders = np.fromiter(map(self._index.get, overlaps, repeat(count)), np.intp, size)
            blocks = np.fromiter(overlaps.values(), np.float64, size)
            tokens[holders] = np.maximum(prompt_tokens - blocks * block_tokens, 1.0)
        return tokens[:count]

    def prefill_steps_ms(self, new_tokens: Floats) -> Floats:
        """Return the constant part of a prefill: ms per step times the steps of `new_tokens`."""
        if new_tokens.max() <= self.token_budget.min():
            return self.step_ms
        return np.ceil(new_tokens / self.token_budget) * self.step_ms

    def add_load_delays(self, costs: Floats, request: PendingRequest) -> None:
        """Add to `costs` how long each worker still loads blocks after its backlog."""
        for name in request.loads:
            index = self._index.get(name)
            if index is not None:
                worker, backlog_ms = self.workers[index], float(self.backlog_ms[index])
                costs[index] += load_delay_ms(request, worker, backlog_ms, self._now)

    def decode_sensitivity(self) -> Floats:
        """Return how much the answers that each worker writes suffer from a prefill."""
        return self.stall_sensitivity

    def workers_at(self, indices: Indices) -> list[WorkerState]:
        """Return the workers of these entries."""
        workers = self.workers
        return [workers[index] for index in indices.tolist()]

    def indices_of(self, names: AbstractSet[str]) -> Indices:
        """Return the entries of these instances, all ranks, and of these ranks. The last result is
        remembered, since requests with the same labels share the set."""
        if names is not self._last_names:
            ranks = self._ranks
            indices = [index for name in names for index in ranks.get(name, ())]
            self._last_names, self._last_indices = names, np.array(indices, dtype=np.intp)
        return self._last_indices

    def _rebuild(self) -> None:
        self.workers = workers = self._states.workers
        self._index = {worker.name: index for index, worker in enumerate(workers)}
        self._ranks = {}
        self._last_names = frozenset()
        self._last_indices = np.array([], dtype=np.intp)
        for index, worker in enumerate(workers):
            for name in worker.names:
                self._ranks.setdefault(name, []).append(index)
        values = np.fromiter(chain.from_iterable(map(self._read, workers)), np.float64)
        self._values = values.reshape(-1, len(self.fields)).T.copy()
        for name, values in zip(self.fields, self._values, strict=True):
            setattr(self, name.rpartition(".")[2], values)
