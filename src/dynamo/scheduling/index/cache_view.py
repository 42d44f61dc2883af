"""What a router believes of every worker's cache: what events say, and what it has sent there."""

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
from dynamo.core.kv_events import KV_EVENTS_SUBJECT, decode_kv_events
from dynamo.core.values import BlocksRemoved, BlocksStored, KvEvent
from dynamo.scheduling.index.approximate_index import ApproximateIndex
from dynamo.scheduling.index.kv_index import DEFAULT_BUDGET_BYTES, KvIndex
from dynamo.scheduling.index.tiered_index import LowerTierBlocks, TieredIndex

log = logging.getLogger(__name__)

CacheViewMode = Literal["exact", "stale", "approximate", "no prefix cache"]
"""exact: the worker's events are complete. stale: a gap is being repaired; what was known is
believed on, predictions beside it. approximate: it sends no events, only predictions tell. no
prefix cache: it keeps nothing for later prompts, and nothing is predicted."""

NO_PREFIX_CACHE: Final = "no prefix cache"

RemoteMatch = Callable[[Sequence[int]], Awaitable[Mapping[str, int]]]
"""Blocks -> worker -> how many of them it holds, of an index elsewhere."""

MAX_LOOP_TURN_S: Final = 0.0005
MAX_REMOTE_MATCHES: Final = 1024
MODE_MESSAGES: Final[dict[CacheViewMode, str]] = {
    "exact": "a worker's cache is known exactly",
    "stale": "events of a worker's cache are missing and asked for again",
    "approximate": "a worker sends no KV events: its cache is guessed from what is sent there",
    NO_PREFIX_CACHE: "a worker has no prefix cache: nothing is expected there",
}
DEFAULT_PREDICTION_TTL_S: Final = 120.0
PREDICTION_BUDGET_DIVISOR: Final = 4
PREDICTED_BLOCK_BYTES: Final = 160


class CacheView:
    """Overlaps of a prompt with every worker's cache.

    A worker is named "instance", or "instance/rank" where it has data-parallel ranks. `ttl_s`: how
    long a prediction is believed where no events come. Of `budget_bytes` a quarter is for
    predictions.
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
        self._approximate_index = ApproximateIndex(
            ttl_s, max_blocks=predicted_bytes // PREDICTED_BLOCK_BYTES
        )
        self._modes: dict[str, CacheViewMode] = {}
        self._cacheless_workers: frozenset[str] = frozenset()
        self._incomplete_workers: set[str] = set()
        self._pending_events: deque[Event] = deque()
        self._unsubscribe: list[Callable[[], None]] = []
        self._remote_match: RemoteMatch | None = None
        self._remote_matches: OrderedDict[int, Mapping[str, int]] = OrderedDict()
        self.event_counts: Counter[str] = Counter()
        self.count_lost_events: Callable[[], int] = lambda: 0

    @property
    def device_index(self) -> KvIndex:
        """Blocks in the devices' memory, as events tell."""
        return self.tiers.device

    @property
    def predicted_blocks(self) -> int:
        """Blocks of prompts that were routed and are not yet for events to tell."""
        self._approximate_index.expire(self._clock.now())
        return self._approximate_index.block_count

    async def subscribe(self, events: Events, subject_prefix: str) -> None:
        """Hear every source of KV events under the prefix, until `close`."""
        self.count_lost_events = events.count_lost_events
        self._unsubscribe.append(await events.subscribe(subject_prefix, self._enqueue_event))

    def use_remote_index(self, match: RemoteMatch) -> None:
        """From now on what events say is asked of another index: `prepare` each prompt."""
        self._remote_match = match

    @property
    def is_remote(self) -> bool:
        """Whether `prepare` is needed."""
        return self._remote_match is not None

    async def fetch_remote_match(self, hashes: Sequence[int]) -> None:
        """Have the other index's answer for this prompt at hand; nothing where there is none."""
        if self._remote_match is None or not hashes:
            return
        answer = await self._remote_match(hashes)
        self._remote_matches[hashes[-1]] = answer
        self._remote_matches.move_to_end(hashes[-1])
        if len(self._remote_matches) > MAX_REMOTE_MATCHES:
            self._remote_matches.popitem(last=False)

    def set_modes(self, modes: Mapping[str, CacheViewMode]) -> None:
        """How far each worker's view can be trusted, as the other index says; those not named are
        approximate."""
        for worker in self._modes.keys() | modes.keys():
            self._set_mode(worker, modes.get(worker, "approximate"))

    def close(self) -> None:
        """Hear no more."""
        self._pending_events.clear()
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._unsubscribe.clear()

    def apply(self, worker: str, changes: Sequence[KvEvent]) -> None:
        """What a worker says of its cache. From now on it is known exactly."""
        tiers, heard = self.tiers, self.event_counts
        for change in changes:
            if isinstance(change, BlocksStored):
                tiers.get_or_create_tier(change.tier).store(worker, change.parent, change.hashes)
                heard["stored"] += len(change.hashes)
            elif isinstance(change, BlocksRemoved):
                tiers.get_or_create_tier(change.tier).remove(worker, change.hashes)
                heard["removed"] += len(change.hashes)
            else:
                tiers.remove_worker(worker)
                heard["cleared"] += 1
        if self._modes.get(worker) != "exact" and worker not in self._incomplete_workers:
            self._set_mode(worker, "exact")

    def remove_worker(self, worker: str) -> None:
        """The worker is no more."""
        self.tiers.remove_worker(worker)
        self._approximate_index.remove_worker(worker)
        self._incomplete_workers.discard(worker)
        if self._modes.pop(worker, None) is not None:
            log.info("worker's cache forgotten", extra={"fields": {"worker": worker}})

    def find_overlaps(self, hashes: Sequence[int]) -> dict[str, int]:
        """worker -> blocks of the longest prefix of `hashes` that it holds on its device, or will
        hold by what was routed there (> 0 only)."""
        if self._remote_match is None:
            found = self.tiers.device.match(hashes)
        else:
            found = dict(self._remote_matches.get(hashes[-1], ())) if hashes else {}
        self._approximate_index.merge_overlaps(found, hashes, self._clock.now())
        return found

    def find_lower_tier_blocks(
        self, hashes: Sequence[int], overlaps: Mapping[str, int]
    ) -> Mapping[str, LowerTierBlocks]:
        """worker -> blocks in lower tiers right after its `overlaps`."""
        return self.tiers.find_lower_tier_blocks(hashes, overlaps)

    def set_cacheless_workers(self, workers: AbstractSet[str]) -> None:
        """These workers, and no others, keep nothing for later prompts, as they say."""
        for worker in workers - self._cacheless_workers:
            self.tiers.remove_worker(worker)
            self._approximate_index.remove_worker(worker)
            log.warning(MODE_MESSAGES[NO_PREFIX_CACHE], extra={"fields": {"worker": worker}})
        self._cacheless_workers = frozenset(workers)

    def on_request_routed(self, worker: str, hashes: Sequence[int]) -> None:
        """A prompt was sent to the worker: it will hold these blocks. The caller leaves `hashes` as
        they are."""
        if worker in self._cacheless_workers:
            return
        if worker not in self._modes:
            self._set_mode(worker, "approximate")
        self._approximate_index.add(worker, hashes, self._clock.now())

    def on_prefill_ended(self, worker: str, hashes: Sequence[int]) -> None:
        """The first token of a routed prompt came, or it failed: its blocks are now for events to
        tell. Where none come, they are believed on."""
        keep = self._modes.get(worker) != "exact"
        self._approximate_index.settle(worker, hashes, self._clock.now(), until_ttl=keep)

    def get_mode(self, worker: str) -> CacheViewMode:
        """How far the view of this worker can be trusted."""
        if worker in self._cacheless_workers:
            return NO_PREFIX_CACHE
        return self._modes.get(worker, "approximate")

    def get_modes(self, workers: Iterable[str] = ()) -> dict[str, CacheViewMode]:
        """The mode of every worker that was heard of or sent to, and of `workers`."""
        return {worker: self.get_mode(worker) for worker in sorted({*self._modes, *workers})}

    def on_event(self, event: Event) -> None:
        """One event of the plane."""
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

    def _enqueue_event(self, event: Event) -> None:
        """Large states take turns with the rest of the loop; order is kept."""
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
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.event_counts["undecodable"] += 1
            fields = {"worker": worker, "error": str(error)}
            log.exception("KV event not understood", extra={"fields": fields})
            self._incomplete_workers.add(worker)
            self._set_mode(worker, "stale")
            return
        self.apply(worker, changes)

    def _set_mode(self, worker: str, mode: CacheViewMode) -> None:
        if self._modes.get(worker) == mode:
            return
        self._modes[worker] = mode
        if mode == "exact":
            self._approximate_index.expire_retained(worker, self._clock.now())
        level = logging.WARNING if mode == "approximate" else logging.DEBUG
        log.log(level, MODE_MESSAGES[mode], extra={"fields": {"worker": worker}})
