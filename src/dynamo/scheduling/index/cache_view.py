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
from dynamo.core.kv_events import KV_EVENTS, decode_changes
from dynamo.core.values import BlocksRemoved, BlocksStored, KvEvent
from dynamo.scheduling.index.kv_index import DEFAULT_BUDGET_BYTES, KvIndex
from dynamo.scheduling.index.predictions import Predictions
from dynamo.scheduling.index.tiers import Below, TieredIndex

log = logging.getLogger(__name__)

Mode = Literal["exact", "stale", "approximate", "no prefix cache"]
"""exact: the worker's events are complete. stale: a gap is being repaired; what was known is
believed on, predictions beside it. approximate: it sends no events, only predictions tell. no
prefix cache: it keeps nothing for later prompts, and nothing is predicted."""

NO_CACHE: Final = "no prefix cache"

Ask = Callable[[Sequence[int]], Awaitable[Mapping[str, int]]]
"""Blocks -> worker -> how many of them it holds, of an index elsewhere."""

TURN_S: Final = 0.0005
MAX_ANSWERS: Final = 1024
MODE_LOG: Final[dict[Mode, str]] = {
    "exact": "a worker's cache is known exactly",
    "stale": "events of a worker's cache are missing and asked for again",
    "approximate": "a worker sends no KV events: its cache is guessed from what is sent there",
    NO_CACHE: "a worker has no prefix cache: nothing is expected there",
}
DEFAULT_TTL_S: Final = 120.0
PREDICTION_SHARE: Final = 4
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
        ttl_s: float = DEFAULT_TTL_S,
    ) -> None:
        self._clock = clock
        self.block_tokens = block_tokens
        predicted_bytes = budget_bytes // PREDICTION_SHARE
        self.tiers = TieredIndex(budget_bytes - predicted_bytes)
        self._predictions = Predictions(ttl_s, max_blocks=predicted_bytes // PREDICTED_BLOCK_BYTES)
        self._modes: dict[str, Mode] = {}
        self._cacheless: frozenset[str] = frozenset()
        self._incomplete: set[str] = set()
        self._unheard: deque[Event] = deque()
        self._unsubscribe: list[Callable[[], None]] = []
        self._ask: Ask | None = None
        self._answers: OrderedDict[int, Mapping[str, int]] = OrderedDict()
        self.heard: Counter[str] = Counter()
        self.lost: Callable[[], int] = lambda: 0

    @property
    def index(self) -> KvIndex:
        """Blocks in the devices' memory, as events tell."""
        return self.tiers.device

    @property
    def predicted_blocks(self) -> int:
        """Blocks of prompts that were routed and are not yet for events to tell."""
        self._predictions.expire(self._clock.now())
        return self._predictions.blocks

    async def follow(self, events: Events, subject_prefix: str) -> None:
        """Hear every source of KV events under the prefix, until `close`."""
        self.lost = events.lost
        self._unsubscribe.append(await events.subscribe(subject_prefix, self._hear_soon))

    def ask(self, match: Ask) -> None:
        """From now on what events say is asked of another index: `prepare` each prompt."""
        self._ask = match

    @property
    def remote(self) -> bool:
        """Whether `prepare` is needed."""
        return self._ask is not None

    async def prepare(self, hashes: Sequence[int]) -> None:
        """Have the other index's answer for this prompt at hand; nothing where there is none."""
        if self._ask is None or not hashes:
            return
        answer = await self._ask(hashes)
        self._answers[hashes[-1]] = answer
        self._answers.move_to_end(hashes[-1])
        if len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)

    def trust(self, modes: Mapping[str, Mode]) -> None:
        """How far each worker's view can be trusted, as the other index says; those not named are
        approximate."""
        for worker in self._modes.keys() | modes.keys():
            self._become(worker, modes.get(worker, "approximate"))

    def close(self) -> None:
        """Hear no more."""
        self._unheard.clear()
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._unsubscribe.clear()

    def apply(self, worker: str, changes: Sequence[KvEvent]) -> None:
        """What a worker says of its cache. From now on it is known exactly."""
        tiers, heard = self.tiers, self.heard
        for change in changes:
            if isinstance(change, BlocksStored):
                tiers.tier(change.tier).store(worker, change.parent, change.hashes)
                heard["stored"] += len(change.hashes)
            elif isinstance(change, BlocksRemoved):
                tiers.tier(change.tier).remove(worker, change.hashes)
                heard["removed"] += len(change.hashes)
            else:
                tiers.drop(worker)
                heard["cleared"] += 1
        if self._modes.get(worker) != "exact" and worker not in self._incomplete:
            self._become(worker, "exact")

    def drop(self, worker: str) -> None:
        """The worker is no more."""
        self.tiers.drop(worker)
        self._predictions.drop(worker)
        self._incomplete.discard(worker)
        if self._modes.pop(worker, None) is not None:
            log.info("worker's cache forgotten", extra={"fields": {"worker": worker}})

    def overlaps(self, hashes: Sequence[int]) -> dict[str, int]:
        """worker -> blocks of the longest prefix of `hashes` that it holds on its device, or will
        hold by what was routed there (> 0 only)."""
        if self._ask is None:
            found = self.tiers.device.match(hashes)
        else:
            found = dict(self._answers.get(hashes[-1], ())) if hashes else {}
        self._predictions.add_to(found, hashes, self._clock.now())
        return found

    def below(self, hashes: Sequence[int], overlaps: Mapping[str, int]) -> Mapping[str, Below]:
        """worker -> blocks in lower tiers right after its `overlaps`."""
        return self.tiers.below(hashes, overlaps)

    def cacheless(self, workers: AbstractSet[str]) -> None:
        """These workers, and no others, keep nothing for later prompts, as they say."""
        for worker in workers - self._cacheless:
            self.tiers.drop(worker)
            self._predictions.drop(worker)
            log.warning(MODE_LOG[NO_CACHE], extra={"fields": {"worker": worker}})
        self._cacheless = frozenset(workers)

    def routed(self, worker: str, hashes: Sequence[int]) -> None:
        """A prompt was sent to the worker: it will hold these blocks. The caller leaves `hashes` as
        they are."""
        if worker in self._cacheless:
            return
        if worker not in self._modes:
            self._become(worker, "approximate")
        self._predictions.routed(worker, hashes, self._clock.now())

    def settled(self, worker: str, hashes: Sequence[int]) -> None:
        """The first token of a routed prompt came, or it failed: its blocks are now for events to
        tell. Where none come, they are believed on."""
        keep = self._modes.get(worker) != "exact"
        self._predictions.settled(worker, hashes, self._clock.now(), keep=keep)

    def mode(self, worker: str) -> Mode:
        """How far the view of this worker can be trusted."""
        if worker in self._cacheless:
            return NO_CACHE
        return self._modes.get(worker, "approximate")

    def modes(self, workers: Iterable[str] = ()) -> dict[str, Mode]:
        """The mode of every worker that was heard of or sent to, and of `workers`."""
        return {worker: self.mode(worker) for worker in sorted({*self._modes, *workers})}

    def hear(self, event: Event) -> None:
        """One event of the plane."""
        if not event.subject.endswith(KV_EVENTS):
            return
        self.heard[event.kind] += 1
        worker = event.publisher
        if event.kind == "gone":
            self.drop(worker)
        elif event.kind == "stale":
            self._become(worker, "stale")
        elif event.kind == "repaired":
            self.apply(worker, ())
        else:
            if event.kind == "dump":
                self._incomplete.discard(worker)
                self.tiers.drop(worker)
            self._take(worker, event.payload)

    def _hear_soon(self, event: Event) -> None:
        """Large states take turns with the rest of the loop; order is kept."""
        if not self._unheard and event.kind != "dump":
            self.hear(event)
            return
        self._unheard.append(event)
        if len(self._unheard) == 1:
            asyncio.get_running_loop().call_soon(self._catch_up)

    def _catch_up(self) -> None:
        until = self._clock.now() + TURN_S
        try:
            while self._unheard:
                self.hear(self._unheard.popleft())
                if self._clock.now() >= until:
                    break
        finally:
            if self._unheard:
                asyncio.get_running_loop().call_soon(self._catch_up)

    def _take(self, worker: str, payload: bytes) -> None:
        try:
            changes = decode_changes(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.heard["undecodable"] += 1
            fields = {"worker": worker, "error": str(error)}
            log.exception("KV event not understood", extra={"fields": fields})
            self._incomplete.add(worker)
            self._become(worker, "stale")
            return
        self.apply(worker, changes)

    def _become(self, worker: str, mode: Mode) -> None:
        if self._modes.get(worker) == mode:
            return
        self._modes[worker] = mode
        if mode == "exact":
            self._predictions.told(worker, self._clock.now())
        level = logging.WARNING if mode == "approximate" else logging.DEBUG
        log.log(level, MODE_LOG[mode], extra={"fields": {"worker": worker}})
