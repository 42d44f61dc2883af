"""Runs faults of the disk tier on one deployment. `make faults` runs all, and the object store's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.cluster import Cluster
from tests.faults.fault import Fault
from tests.faults.kv_stores import KV_STORES

QUICK = [fault for fault in KV_STORES if fault.quick]


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    fault = QUICK[0]
    folder = tmp_path_factory.mktemp("faults")
    cluster = Cluster(
        tiny_model, folder, workers=fault.workers, flags=fault.flags, timing=fault.timing
    )
    with cluster:
        yield cluster


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.run.__name__)
async def test_fault(fault: Fault, cluster: Cluster) -> None:
    await fault.run(cluster)
