"""The endpoint `kv` of a worker: the state of its KV blocks in each tier, removal and pins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from dynamo.communication.requests import ResponseWriter
from dynamo.core.clock import Clock
from dynamo.core.errors import DECODE_ERRORS, InvalidRequest, NotFound, ProtocolError
from dynamo.core.hashing import TOKEN_BYTES, root_identity
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.sequence import TokenContent
from dynamo.inference.tiers.kv_tiers import KvTiers
from dynamo.inference.tiers.pins import BlockPins, PinnedPrompt
from dynamo.inference.tiers.tier import KvTier
from dynamo.telemetry.metrics import Registry

KV_ENDPOINT = "kv"
ALL_TIERS = "all"
DEVICE = "device"
CHANGES = {"loaded": "hits", "stored": "stored", "evicted": "evicted", "corrupt": "corrupt"}
"""The fields of `TierStatus` by the label of the metric."""


class PinRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt whose blocks a tier keeps for `ttl_s` seconds (0: without end)."""

    tier: str
    token_ids: bytes
    salt: str = ""
    ttl_s: float = 0.0


class KvRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call of the endpoint, which acts first and then answers. `clear`: the tier to empty, or
    "all". `unpin`: the pin to end, or "all"."""

    clear: str = ""
    pin: PinRequest | None = None
    unpin: str = ""


class TierStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """The KV blocks of one engine in one tier. `rank`: the engine's data-parallel rank.

    `hits`: blocks that prompts reused, which a tier below the device has loaded. `load_ms`: the
    predicted time to load one block. `age_s`: about how long a block stays; while nothing was
    evicted, the time since the start. `pins`: the pinned prompts, whose blocks are `pinned_blocks`
    without those that they share. `problem` says why the tier holds nothing now.
    """

    tier: str
    blocks: int
    capacity_blocks: int
    block_bytes: int
    rank: int = 0
    hits: int = 0
    stored: int = 0
    evicted: int = 0
    corrupt: int = 0
    failures: int = 0
    load_s: float = 0.0
    load_ms: float = 0.0
    age_s: float = 0.0
    problem: str = ""
    pinned_blocks: int = 0
    pins: list[PinnedPrompt] = []


class KvAnswer(msgspec.Struct, frozen=True):
    """The tiers of all engines of a worker, how many blocks the call removed, and the pin that it
    made or how many it ended."""

    tiers: list[TierStatus]
    cleared: int = 0
    pin: str = ""
    unpinned: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(KvRequest).decode
decode_kv_answer = msgspec.msgpack.Decoder(KvAnswer).decode
"""Decodes an answer of the endpoint. Raises `msgspec.DecodeError`."""


class KvControl:
    """Serves the endpoint for the engines of a worker, one for each data-parallel rank."""

    def __init__(self, engines: Sequence[BatchedEngine], clock: Clock) -> None:
        self._engines = engines
        self._clock = clock
        self._started_s = clock.now()

    @property
    def has_tiers(self) -> bool:
        """Whether an engine has a tier below the device."""
        return any(engine.tiers.can_load for engine in self._engines)

    def sum_by_tier(self, field: str) -> Mapping[tuple[str, ...], float]:
        """Return the sum of a field of `TierStatus` by tier below the device."""
        sums: Counter[tuple[str, ...]] = Counter()
        for status in self.tiers():
            if status.tier != DEVICE:
                sums[status.tier,] += getattr(status, field)
        return sums

    def working_share(self) -> Mapping[tuple[str, ...], float]:
        """Return by tier the share of the engines without a problem."""
        tiers = [status for status in self.tiers() if status.tier != DEVICE]
        working = Counter(status.tier for status in tiers if not status.problem)
        return {(name,): working[name] / n for name, n in Counter(t.tier for t in tiers).items()}

    async def handle(self, payload: bytes, outgoing: ResponseWriter) -> None:
        """Serve one call. Raises `NotFound` for a tier or pin that the worker does not have, and
        `InvalidRequest` for a prompt that cannot be pinned."""
        try:
            request = _decode(payload)
        except DECODE_ERRORS as error:
            raise ProtocolError(f"not a request for KV tiers: {error}") from error
        engines, order, pin = self._engines, request.pin, ""
        cleared = sum(clear_tier(engine, request.clear) for engine in engines)
        if order is not None:
            for engine in engines:
                pin = pin_prompt(engine, order)
        unpinned = unpin(engines, request.unpin) if request.unpin else 0
        outgoing.send(_encode(KvAnswer(self.tiers(), cleared, pin, unpinned)))

    def tiers(self) -> list[TierStatus]:
        """Return the state of all tiers, the fastest first."""
        uptime_s = self._clock.now() - self._started_s
        return [
            status
            for rank, engine in enumerate(self._engines)
            for status in _tiers_of(engine, rank, uptime_s)
        ]


def clear_tier(engine: BatchedEngine, tier: str) -> int:
    """Empty a tier of an engine, or its prefix cache with all tiers, and return how many blocks it
    held; "" for none. Raises `NotFound`."""
    if not tier:
        return 0
    if tier == ALL_TIERS:
        return engine.clear_prefix_cache()
    names = [below.name for below in engine.tiers.tiers]
    if tier not in names:
        raise NotFound(
            f"this worker has no tier {tier!r} below the device",
            hint=f"its tiers: {', '.join(names) or 'none'}; {ALL_TIERS!r} empties the device, too",
        )
    count = engine.tiers.clear(tier)
    engine.publish_kv_events()
    return count


def pin_prompt(engine: BatchedEngine, order: PinRequest) -> str:
    """Pin the full blocks of a prompt in a tier and return the pin's name. Raises `NotFound` if the
    engine has no such tier that pins, and `InvalidRequest`."""
    pinning = {tier.name: tier for tier in engine.tiers.tiers if tier.pins is not None}
    if not isinstance(engine.tiers, KvTiers) or order.tier not in pinning:
        raise NotFound(
            f"this worker pins no prompts in a tier {order.tier!r}",
            hint=f"it pins in: {', '.join(pinning) or 'none; --kv-host-size adds host memory'}",
        )
    block_tokens = engine.scheduler.pool.block_tokens
    if len(order.token_ids) < TOKEN_BYTES * block_tokens:
        raise InvalidRequest(
            f"the prompt has {len(order.token_ids) // TOKEN_BYTES} tokens, and a block has "
            f"{block_tokens}",
            hint="pin a longer prompt: full blocks alone are kept",
        )
    if len(order.token_ids) % TOKEN_BYTES:
        raise ProtocolError(f"{len(order.token_ids)} bytes are not ids of {TOKEN_BYTES} bytes")
    content = TokenContent(order.token_ids, block_tokens, order.salt)
    content.identity = root_identity(order.salt)
    return engine.tiers.pin(pinning[order.tier], content, order.ttl_s)


def unpin(engines: Sequence[BatchedEngine], name: str) -> int:
    """End a pin in all tiers, or all pins, and return how many ended. Raises `NotFound` if there is
    no such pin."""
    count = 0
    for engine in engines:
        for tier in engine.tiers.tiers:
            if tier.pins is not None:
                names = list(tier.pins.prompts()) if name == ALL_TIERS else [name]
                count += sum(map(tier.pins.remove, names))
    if not count and name != ALL_TIERS:
        raise NotFound(f"this worker has no pin {name!r}", hint="`dynamo kv --json` lists pins")
    return count


def _tiers_of(engine: BatchedEngine, rank: int, uptime_s: float) -> Iterator[TierStatus]:
    """Yield the state of the device and of each tier below."""
    pool, region = engine.scheduler.pool, engine.runner.region
    yield TierStatus(
        DEVICE,
        pool.cached,
        pool.num_blocks,
        0 if region is None else region.slot_bytes,
        rank,
        hits=engine.counters.cached_tokens // pool.block_tokens,
        evicted=pool.evictions,
        age_s=_age_s(uptime_s, pool.cached, pool.evictions),
    )
    for tier in engine.tiers.tiers:
        counters, pins = tier.counters, tier.pins
        yield TierStatus(
            tier.name,
            tier.blocks,
            tier.capacity_blocks,
            tier.block_bytes,
            rank,
            hits=counters.loaded_blocks,
            stored=counters.stored_blocks,
            evicted=counters.evicted_blocks,
            corrupt=counters.corrupt_blocks,
            failures=counters.failures,
            load_s=counters.load_s,
            load_ms=1000 * tier.predict_load_s(1),
            age_s=_age_s(uptime_s, tier.blocks, counters.evicted_blocks),
            problem=tier.problem,
            pinned_blocks=0 if pins is None else len(pins),
            pins=[] if pins is None else _describe_pins(tier, pins),
        )


def _describe_pins(tier: KvTier, pins: BlockPins) -> list[PinnedPrompt]:
    return [
        PinnedPrompt(pin, len(hashes), sum(map(tier.holds, hashes)), ttl_s)
        for pin, (hashes, ttl_s) in pins.prompts().items()
    ]


def _age_s(uptime_s: float, blocks: int, evicted: int) -> float:
    """The mean time that a block stays, by the rate at which blocks are replaced."""
    return uptime_s * blocks / (blocks + evicted) if blocks else 0.0


def declare_tier_metrics(registry: Registry, control: KvControl) -> None:
    """Declare the state and the totals of the tiers below the device, summed over the ranks."""
    registry.gauge(
        "dynamo_worker_tier_blocks",
        "KV blocks in a tier below the device.",
        ("tier",),
        callback=lambda: control.sum_by_tier("blocks"),
    )
    registry.gauge(
        "dynamo_worker_tier_capacity_blocks",
        "KV blocks for which a tier has room.",
        ("tier",),
        callback=lambda: control.sum_by_tier("capacity_blocks"),
    )
    registry.gauge(
        "dynamo_worker_tier_up_ratio",
        "Share of a worker's engines whose tier works.",
        ("tier",),
        callback=control.working_share,
        merge="min",
    )
    registry.counter(
        "dynamo_worker_tier_blocks_total",
        "KV blocks loaded from a tier, stored, evicted, or with a wrong checksum or identity.",
        ("tier", "change"),
        callback=lambda: {
            (tier, change): count
            for change, field in CHANGES.items()
            for (tier,), count in control.sum_by_tier(field).items()
        },
    )
    registry.counter(
        "dynamo_worker_tier_failures_total",
        "Operations that the place of a tier refused.",
        ("tier",),
        callback=lambda: control.sum_by_tier("failures"),
    )
    registry.counter(
        "dynamo_worker_tier_load_seconds_total",
        "Seconds of loads from a tier.",
        ("tier",),
        callback=lambda: control.sum_by_tier("load_s"),
    )
