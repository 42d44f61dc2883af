"""Runs every fuzzer for seconds. `make fuzz` runs them longer."""

from __future__ import annotations

import pytest
from tests.fuzz.campaign import Target, run
from tests.fuzz.frames_target import FramesTarget
from tests.fuzz.framing_target import FramingTarget
from tests.fuzz.http_targets import HttpTarget, JsonTarget

GROWTH_BYTES = 32 << 20
SECONDS = 2.0


@pytest.mark.parametrize("target", [FramesTarget, HttpTarget, FramingTarget, JsonTarget])
async def test_no_crash_no_hang_no_growth(target: type[Target]) -> None:
    result = await run(target(), SECONDS, seed=1)
    assert result.findings == []
    assert result.open_count == 0
    assert result.runs > 50
    assert result.grown_bytes < GROWTH_BYTES
