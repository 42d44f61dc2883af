"""The quick part of the fault table on plain planes; `make faults` runs all of it on all planes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults.stage import Stage
from tests.faults.table import TABLE, Fault

QUICK = [fault for fault in TABLE if fault.quick]


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.play.__name__)
async def test_fault(fault: Fault, tiny_model: Path, tmp_path: Path) -> None:
    stage = Stage(tiny_model, tmp_path, workers=fault.workers, frontends=fault.frontends)
    with stage:
        await fault.play(stage)
