"""Runs faults of prompts that a prefill worker computes on one deployment. `make faults` runs all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.cluster import Cluster
from tests.faults.disaggregation import DISAGGREGATED
from tests.faults.fault import Fault

QUICK = [fault for fault in DISAGGREGATED if fault.quick]


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    fault = DISAGGREGATED[0]
    cluster = Cluster(
        tiny_model,
        tmp_path_factory.mktemp("faults"),
        workers=0,
        prefill=fault.prefill,
        decode=fault.decode,
        flags=fault.flags,
        timing=fault.timing,
    )
    with cluster:
        yield cluster


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.run.__name__)
async def test_fault(fault: Fault, cluster: Cluster) -> None:
    await fault.run(cluster)
