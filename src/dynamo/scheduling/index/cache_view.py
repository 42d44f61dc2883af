"""The router's view of every worker's cache: KV events combined with predictions."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, Literal

import msgspec

from dynamo.communication.events import Event, Events
from dynamo.core.clock import Clock
from dynamo.core.errors import DECODE_ERRORS
from dynamo.core.kv_events import KV_EVENTS_SUBJECT, decode_kv_events
from dynamo.core.values import BlocksRemoved, BlocksStored, KvEvent
from dynamo.scheduling.index.approximate_index import ApproximateIndex
from dynamo.scheduling.index.kv_index import DEFAULT_BUDGET_BYTES
from dynamo.scheduling.index.removed_blocks import RemovedBlocks
from dynamo.scheduling.index.tiered_index import TieredIndex, TierRun, TierRuns, skip_blocks

log = logging.getLogger(__name__)

CacheViewMode = Literal["exact", "stale", "approximate", "no prefix cache"]
"""How the cache of a worker is known.

- exact: from complete events.
- stale: a gap is being repaired; the last known blocks and predictions are used.
- approximate: from predictions only, because the worker sends no events.
- no prefix cache: nothing is predicted, because the worker keeps nothing for later prompts.
"""

NO_PREFIX_CACHE: Final = "no prefix cache"


class IndexMatch(msgspec.Struct, frozen=True, omit_defaults=True):
    """The blocks of a prompt in an index. `overlaps`: worker -> blocks on the device. `runs`: where
    the blocks after those lie below the device. `asked_share`: see `RemovedBlocks`."""

    overlaps: dict[str, int] = {}
    runs: dict[str, list[TierRun]] = {}
    asked_share: float = 0.0


RemoteMatch = Callable[[Sequence[int]], Awaitable[IndexMatch]]
"""Look block hashes up in a remote index."""

MAX_LOOP_TURN_S: Final = 0.0005
MAX_REMOTE_MATCHES: Final = 1024
MODE_MESSAGES: Final[dict[CacheViewMode, str]] = {
    "exact": "a worker's cache is known exactly",
    "stale": "KV events of a worker are missing and are being repaired",
    "approximate": "a worker sends no KV events: its cache is predicted from routed prompts",
    NO_PREFIX_CACHE: "a worker has no prefix cache: no overlap is predicted for it",
}
DEFAULT_PREDICTION_TTL_S: Final = 120.0
PREDICTION_BUDGET_DIVISOR: Final = 4
PREDICTED_BLOCK_BYTES: Final = 160


class CacheView:
    """Overlaps of prompts with every worker's cache.

    A worker is named "instance", or "instance/rank" with data-parallel ranks. `ttl_s` is the time
    to live of predictions for workers without events. A quarter of `budget_bytes` is for
    predictions. `device_index` holds the blocks in device memory that events report. With a
    `remote_match`, a remote index replaces events; call `fetch_remote_match` before each lookup.
    `removed_blocks` is set by a user that wants to know which removals cost prompts.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
        block_tokens: int = 16,
        ttl_s: float = DEFAULT_PREDICTION_TTL_S,
    ) -> None:
        self._clock = clock
        self.block_tokens = block_tokens
        predicted_bytes = budget_bytes // PREDICTION_BUDGET_DIVISOR
        self.tiers = TieredIndex(budget_bytes - predicted_bytes)
        self.device_index = self.tiers.device
        self.has_lower_tiers = False
        self._approximate_index = ApproximateIndex(
            ttl_s, max_blocks=predicted_bytes // PREDICTED_BLOCK_BYTES
        )
        self._modes: dict[str, CacheViewMode] = {}
        self._cacheless_workers: frozenset[str] = frozenset()
        self._incomplete_workers: set[str] = set()
        self.removed_blocks: RemovedBlocks | None = None
        self._pending_events: deque[Event] = deque()
        self._unsubscribe: list[Callable[[], None]] = []
        self.remote_match: RemoteMatch | None = None
        self._remote_matches: OrderedDict[int, IndexMatch] = OrderedDict()
        self.event_counts: Counter[str] = Counter()
        self.count_lost_events: Callable[[], int] = lambda: 0

    @property
    def predicted_blocks(self) -> int:
        """The number of currently predicted blocks."""
        self._approximate_index.expire(self._clock.now())
        return self._approximate_index.block_count

    async def subscribe(self, events: Events, subject_prefix: str) -> None:
        """Subscribe to every source of KV events below the prefix, until `close`."""
        self.count_lost_events = events.count_lost_events
        self._unsubscribe.append(await events.subscribe(subject_prefix, self.receive))

    async def fetch_remote_match(self, hashes: Sequence[int]) -> None:
        """Fetch and cache the overlaps of this prompt from the remote index, if there is one."""
        if self.remote_match is None or not hashes:
            return
        match = await self.remote_match(hashes)
        if match.runs:
            self.has_lower_tiers = True
        if self.removed_blocks is not None and match.asked_share:
            self.removed_blocks.set_remote_share(match.asked_share)
        self._remote_matches[hashes[-1]] = match
        self._remote_matches.move_to_end(hashes[-1])
        if len(self._remote_matches) > MAX_REMOTE_MATCHES:
            self._remote_matches.popitem(last=False)

    def set_modes(self, modes: Mapping[str, CacheViewMode]) -> None:
        """Set the modes of the remote index. Workers without a mode become approximate."""
        for worker in self._modes.keys() | modes.keys():
            self._set_mode(worker, modes.get(worker, "approximate"))

    def close(self) -> None:
        """Unsubscribe, and drop events that were not processed yet."""
        self._pending_events.clear()
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._unsubscribe.clear()

    def apply(self, worker: str, changes: Sequence[KvEvent]) -> None:
        """Apply changes that a worker reports. Its mode becomes exact unless events are missing."""
        tiers, counts = self.tiers, self.event_counts
        for change in changes:
            if isinstance(change, BlocksStored):
                tiers.store(worker, change.tier, change.parent, change.hashes)
                counts["stored"] += len(change.hashes)
            elif isinstance(change, BlocksRemoved):
                tiers.remove(worker, change.tier, change.hashes)
                if self.removed_blocks is not None and change.tier == "device":
                    self.removed_blocks.on_removed(change.hashes)
                counts["removed"] += len(change.hashes)
            else:
                tiers.remove_worker(worker)
                counts["cleared"] += 1
        if tiers.lower is not None:
            self.has_lower_tiers = True
        if self._modes.get(worker) != "exact" and worker not in self._incomplete_workers:
            self._set_mode(worker, "exact")

    def remove_worker(self, worker: str) -> None:
        """Remove everything known about the worker."""
        self.tiers.remove_worker(worker)
        self._approximate_index.remove_worker(worker)
        self._incomplete_workers.discard(worker)
        if self._modes.pop(worker, None) is not None:
            log.info("cache view of a worker removed", extra={"fields": {"worker": worker}})

    def find_overlaps(self, hashes: Sequence[int]) -> dict[str, int]:
        """Return worker -> blocks of the longest prefix of `hashes` that its device holds or is
        predicted to hold (> 0 only)."""
        if self.remote_match is None:
            overlaps = self.device_index.match(hashes)
        else:
            match = self._remote_matches.get(hashes[-1]) if hashes else None
            overlaps = dict(match.overlaps) if match else {}
        self._approximate_index.merge_overlaps(overlaps, hashes, self._clock.now())
        return overlaps

    def find_runs(self, hashes: Sequence[int], overlaps: Mapping[str, int]) -> TierRuns:
        """Return worker -> where the blocks after `overlaps` (a result of `find_overlaps`) lie
        below the device. The entry ANY_WORKER holds for all workers without an entry and an
        overlap."""
        if self.remote_match is None:
            return self.tiers.lower.find_runs(hashes, overlaps) if self.tiers.lower else {}
        match = self._remote_matches.get(hashes[-1]) if hashes else None
        if match is None:
            return {}
        known = match.overlaps.get
        return {
            worker: skip_blocks(runs, overlaps.get(worker, 0) - known(worker, 0))
            for worker, runs in match.runs.items()
        }

    def set_cacheless_workers(self, workers: AbstractSet[str]) -> None:
        """Set the workers that announce that they keep nothing for later prompts."""
        for worker in workers - self._cacheless_workers:
            self.tiers.remove_worker(worker)
            self._approximate_index.remove_worker(worker)
            log.warning(MODE_MESSAGES[NO_PREFIX_CACHE], extra={"fields": {"worker": worker}})
        self._cacheless_workers = frozenset(workers)

    def on_request_routed(self, worker: str, hashes: Sequence[int]) -> None:
        """Predict that the worker will hold these blocks. The caller must not change `hashes`."""
        if worker in self._cacheless_workers:
            return
        if worker not in self._modes:
            self._set_mode(worker, "approximate")
        self._approximate_index.add(worker, hashes, self._clock.now())

    def on_prefill_ended(self, worker: str, hashes: Sequence[int]) -> None:
        """End the prediction of a routed prompt after its first token or failure. Without events it
        remains until its time to live ends."""
        now, until_ttl = self._clock.now(), self._modes.get(worker) != "exact"
        self._approximate_index.end_prediction(worker, hashes, now, until_ttl=until_ttl)

    def get_mode(self, worker: str) -> CacheViewMode:
        """Return the mode of a worker."""
        if worker in self._cacheless_workers:
            return NO_PREFIX_CACHE
        return self._modes.get(worker, "approximate")

    def get_modes(self, workers: Iterable[str] = ()) -> dict[str, CacheViewMode]:
        """Return the modes of all known workers and of `workers`."""
        return {worker: self.get_mode(worker) for worker in sorted({*self._modes, *workers})}

    def on_event(self, event: Event) -> None:
        """Apply an event. Events of other subjects are ignored."""
        if not event.subject.endswith(KV_EVENTS_SUBJECT):
            return
        self.event_counts[event.kind] += 1
        worker = event.publisher
        if event.kind == "gone":
            self.remove_worker(worker)
        elif event.kind == "stale":
            self._set_mode(worker, "stale")
        elif event.kind == "repaired":
            self.apply(worker, ())
        else:
            if event.kind == "dump":
                self._incomplete_workers.discard(worker)
                self.tiers.remove_worker(worker)
            self._apply_payload(worker, event.payload)

    def receive(self, event: Event) -> None:
        """Apply an event in order. Dumps, and events behind them, wait for short loop turns."""
        if not self._pending_events and event.kind != "dump":
            self.on_event(event)
            return
        self._pending_events.append(event)
        if len(self._pending_events) == 1:
            asyncio.get_running_loop().call_soon(self._process_pending_events)

    def _process_pending_events(self) -> None:
        until = self._clock.now() + MAX_LOOP_TURN_S
        try:
            while self._pending_events:
                self.on_event(self._pending_events.popleft())
                if self._clock.now() >= until:
                    break
        finally:
            if self._pending_events:
                asyncio.get_running_loop().call_soon(self._process_pending_events)

    def _apply_payload(self, worker: str, payload: bytes) -> None:
        try:
            changes = decode_kv_events(payload)
        except DECODE_ERRORS as error:
            self.event_counts["undecodable"] += 1
            fields = {"worker": worker, "error": str(error)}
            log.exception("a KV event could not be decoded", extra={"fields": fields})
            self._incomplete_workers.add(worker)
            self._set_mode(worker, "stale")
            return
        self.apply(worker, changes)

    def _set_mode(self, worker: str, mode: CacheViewMode) -> None:
        if self._modes.get(worker) == mode:
            return
        self._modes[worker] = mode
        if mode == "exact":
            self._approximate_index.end_until_ttl(worker, self._clock.now())
        level = logging.WARNING if mode == "approximate" else logging.DEBUG
        log.log(level, MODE_MESSAGES[mode], extra={"fields": {"worker": worker}})
