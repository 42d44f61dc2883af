"""No client can make series of metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.attacks.hostile_series import count_series, send_hostile
from tests.faults.cluster import Cluster


async def test_hostile_requests_make_no_series(tiny_model: Path, tmp_path: Path) -> None:
    with Cluster(tiny_model, tmp_path, workers=1, flags=("--observer",)) as cluster:
        assert await send_hostile(cluster.port, "tiny", 1_000, 0) > 990
        await asyncio.sleep(1.5)  # stories are published once a second
        before = count_series(cluster)
        assert before > 100
        assert await send_hostile(cluster.port, "tiny", 4_000, 1) > 3_960
        await asyncio.sleep(1.5)
        assert count_series(cluster) == before
