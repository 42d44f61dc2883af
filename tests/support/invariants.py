"""Checks of the counts that the router and the engines keep, for tests."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo.inference.block_pool import BlockPool
from dynamo.inference.tiers.resident_blocks import TierSlots
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.worker import WorkerState


def _check(violations: Mapping[str, bool]) -> None:
    broken = [text for text, violated in violations.items() if violated]
    assert not broken, "; ".join(broken)


def check_ledger(ledger: Ledger) -> None:
    """Fail unless each request is counted once, at its workers."""
    entries = [*ledger.requests.values()]
    for requests in ledger.peers.values():
        entries += requests.values()
    workers = list(ledger.workers.all())
    violations = {
        "a request is at two workers, or at none": sum(len(each.active) for each in workers)
        != len(entries),
        "an entry has ended": not all(placed.open for placed in entries),
        "a request is not at its worker": any(
            placed.worker.active.get(placed.key) is not placed for placed in entries
        ),
        "a request is not expected where it moves": any(
            placed.decode_worker is not None
            and placed.decode_worker.arriving.get(placed.key) is not placed
            for placed in entries
        ),
        "a request with a token is expected elsewhere": any(
            placed.decode_worker is not None and placed.first_token_s is not None
            for placed in entries
        ),
    }
    for worker in workers:
        violations |= _check_worker(worker)
    _check(violations)


def _check_worker(worker: WorkerState) -> dict[str, bool]:
    """Return which counts of a worker are not those of its requests."""
    name, active, arriving = worker.name, worker.active.values(), worker.arriving.values()
    elsewhere = [placed for placed in active if placed.decode_worker is not None]
    own = [placed for placed in (*active, *arriving) if not placed.peer]
    own_elsewhere = [placed for placed in elsewhere if not placed.peer]
    pending = [placed for placed in active if placed.counted and placed.first_token_s is None]
    expected = [placed.prompt_tokens for placed in arriving if placed.counted]
    return {
        f"{name}: occupied slots": worker.slots.occupied != len(own) - len(own_elsewhere),
        f"{name}: prompts for others": worker.prompts != len(own_elsewhere),
        f"{name}: expected requests": any(each.decode_worker is not worker for each in arriving),
        f"{name}: pending prompts": worker.pending_prefills != len(pending),
        f"{name}: pending tokens": worker.pending_prefill_tokens
        != sum(placed.new_tokens for placed in pending),
        f"{name}: expected tokens": worker.arriving_tokens != sum(expected),
    }


def check_pool(pool: BlockPool) -> None:
    """Fail if a block is lost, counted twice or in two states."""
    free, cached, evictable = pool._free_blocks, pool._cached_blocks, len(pool._evictable)
    unused = [block for block in pool._blocks if not block.ref_count]
    violations = {
        "a block is free twice": len({block.id for block in free}) != len(free),
        "a free block is in use": any(block.ref_count or block.cached for block in free),
        "a wrong hash": any(
            not block.cached or block.block_hash != key for key, block in cached.items()
        ),
        "a negative reference count": any(block.ref_count < 0 for block in pool._blocks),
        "a cached block is not in the map": sum(block.cached for block in pool._blocks)
        != len(cached),
        "a lost evictable block": sum(block.cached for block in unused) != evictable,
        "a lost free block": sum(not block.cached for block in unused) != len(free),
    }
    _check(violations)


def check_slots(slots: TierSlots) -> None:
    """Fail if a slot is lost or used twice. Call while nothing is copied."""
    used, free = [*slots.table.oldest()], slots._free
    violations = {
        "a slot is in use twice": len({*used, *free}) != len(used) + len(free),
        "a slot is lost": len(used) + len(free) != slots._used,
        "too many blocks": slots._used > slots.capacity,
        "a load did not end": bool(slots._reading or slots._dropped),
    }
    _check(violations)
