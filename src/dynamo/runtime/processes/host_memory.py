"""The memory of a host, which its workers share."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.runtime.processes.child_spec import ChildSpec


class HostMemory:
    """Compares what processes need with the memory that all of them may use together."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes

    def lack_of(self, specs: Sequence[ChildSpec], others: Sequence[ChildSpec]) -> str:
        """Return what processes lack beside others, with the numbers, or "" if they fit."""
        used = needed_bytes(others)
        needed = needed_bytes([*others, *specs]) - used
        if not self._limit_bytes or needed + used <= self._limit_bytes:
            return ""
        return (
            f"its workers need {needed >> 20} MiB, and {used >> 20} MiB of the "
            f"{self._limit_bytes >> 20} MiB for workers are taken (runtime.memory)"
        )

    def spare_bytes(self, specs: Sequence[ChildSpec]) -> int:
        """Return what processes leave, at least 1; 0 without a limit."""
        return max(1, self._limit_bytes - needed_bytes(specs)) if self._limit_bytes else 0


def needed_bytes(specs: Sequence[ChildSpec]) -> int:
    """Return the memory of processes. Shared memory counts once."""
    needs = [spec.memory for spec in specs]
    shared = {need.shared_key: need.shared_bytes for need in needs}
    return sum(need.own_bytes for need in needs) + sum(shared.values())
