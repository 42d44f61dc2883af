"""The deployment of the attacks serves, and its measurements work."""

from __future__ import annotations

from tests.attacks.client import bystanders, chat
from tests.faults.cluster import Cluster


def test_bystanders_are_undisturbed_without_an_attack(deployment: Cluster) -> None:
    """Streams, /live and memory are measured, and nothing is wrong."""
    with bystanders(deployment) as seen:
        answer = chat(deployment.port)
    assert answer.status == 200
    assert seen.errors == []
    assert 0 < seen.longest_gap_s < 2
    assert 0 < seen.longest_live_s < 2
    assert len(seen.growth_mb) == 3
