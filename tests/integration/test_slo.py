"""`dynamo slo` counts what clients count, beside a killed worker and a killed observer."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.faults.cluster import Cluster, InjectFault
from tests.faults.stream_client import Answer, ask

TTFT_S, GAP_S = 2.0, 3.0
FLAGS = (
    "--observer",
    *("--observer.ttft_slo", str(TTFT_S)),
    *("--observer.gap_slo", str(GAP_S)),
    *("--observer.slo_target", "0.9"),
    *("--server.max_concurrent_requests", "24", "--server.max_waiting_requests", "0"),
    *("--num-blocks", "4000"),
)
LATE_WORDS = 800
"""A prompt of so many words has about 5,000 tokens, of 1 ms each."""


def judge(answer: Answer) -> str:
    """Return what a client says of its answer."""
    if answer.status != 200:
        return "client" if answer.status < 500 and answer.status not in (408, 429) else "failed"
    if not answer.complete:
        return "failed"
    late = answer.first_s > TTFT_S or answer.longest_gap_s > GAP_S
    return "late" if late else "good"


async def send_all(cluster: Cluster, keys: Iterable[int]) -> list[Answer]:
    return await cluster.ask_all(list(keys), 5)


async def test_the_report_is_what_the_clients_counted(tiny_model: Path, tmp_path: Path) -> None:
    with Cluster(tiny_model, tmp_path, workers=2, flags=FLAGS, timing="constant:1,20") as cluster:
        answers = await send_all(cluster, range(20))
        answers += [await ask(cluster.port, key, 5, words=LATE_WORDS) for key in (20, 21)]
        answers += [await ask(cluster.port, 22, 5, temperature=-1) for _ in range(3)]
        answers += await cluster.ask_during(_kill_a_worker(cluster), streams=10, tokens=40)
        await cluster.wait_for(cluster.all_ready)

        while (report := await read_report(cluster))["requests"] != 32:
            assert report["requests"] < 32, report
            await asyncio.sleep(0.2)
        killed = cluster.kill("observer")
        answers += await send_all(cluster, range(100, 160))  # more than there are places
        await cluster.wait_for(
            lambda: killed not in [each.pid for each in cluster.ready("observer")]
        )
        await cluster.wait_for(lambda: cluster.ready("observer"))
        answers += await send_all(cluster, range(200, 210))

        counted = Counter(map(judge, answers))
        assert counted["client"] == 3
        assert counted["failed"] >= 30
        assert counted["late"] >= 2
        expected = sum(counted.values()) - counted["client"]
        while (report := await read_report(cluster))["requests"] != expected:
            assert report["requests"] < expected, (report, counted)
            await asyncio.sleep(0.2)
        assert (report["failed"], report["late"]) == (counted["failed"], counted["late"])
        assert report["budget_left"] < 0
        assert "new prompt" in report["causes"]
        shown = await cluster.command("slo")
    assert f"{expected} " in shown
    assert "spent in 30d by:" in shown


async def read_report(cluster: Cluster) -> dict[str, Any]:
    """Return the window of an hour."""
    (observer,) = cluster.ready("observer")
    page = await asyncio.to_thread(urlopen, f"{observer.address}/slo", timeout=10)
    with page:
        return dict(json.load(page)["windows"][0])


def _kill_a_worker(cluster: Cluster) -> InjectFault:
    async def kill() -> None:
        cluster.kill("worker")

    return kill
