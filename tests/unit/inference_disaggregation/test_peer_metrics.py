"""A worker's metric of its peers has a bounded number of series."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dynamo.inference.disaggregation.worker_prefill import NAMED_PEERS, WorkerPrefill


def test_the_largest_peers_have_names_and_the_others_one_together() -> None:
    pulled = {f"worker-{number}": 100 * number for number in range(1, 41)}
    prefill: Any = WorkerPrefill.__new__(WorkerPrefill)
    prefill._peers = [SimpleNamespace(bytes_pulled=lambda: pulled)]
    prefill._pulled_before, prefill._bytes_by_named_peer, prefill._other_bytes = {}, {}, 0.0
    counts = prefill._bytes_by_peer()
    assert len(counts) == NAMED_PEERS + 1
    assert counts["worker-40",] == 4000
    assert counts["other",] == sum(range(100, 3300, 100))

    pulled["worker-1"] = 1_000_000  # a name stays until its worker has left
    counts = prefill._bytes_by_peer()
    assert ("worker-1",) not in counts
    other = sum(range(200, 3300, 100)) + 1_000_000
    assert counts["other",] == other
    del pulled["worker-40"], pulled["worker-2"]
    counts = prefill._bytes_by_peer()
    assert ("worker-40",) not in counts
    assert counts["other",] == other  # a counter never falls
    pulled["worker-1"] += 50
    counts = prefill._bytes_by_peer()
    assert counts["worker-1",] == 50  # its earlier bytes are in "other"
    assert counts["other",] == other
    assert len(counts) == NAMED_PEERS + 1
    pulled["worker-39"] = 10  # the worker went and came back
    assert prefill._bytes_by_peer()["worker-39",] == 3910
