"""Runs the quick faults of the table on plain planes. `make faults` runs all on all planes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults.cluster import Cluster
from tests.faults.fault import Fault
from tests.faults.kv_stores import KV_STORES
from tests.faults.pods import PodCluster
from tests.faults.table import TABLE

QUICK = [fault for fault in TABLE if fault.quick and not (fault.prefill or fault in KV_STORES)]


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.run.__name__)
async def test_fault(fault: Fault, tiny_model: Path, tmp_path: Path) -> None:
    kind = PodCluster if "pods" in fault.planes else Cluster
    with kind(tiny_model, tmp_path, workers=fault.workers, frontends=fault.frontends) as cluster:
        await fault.run(cluster)
