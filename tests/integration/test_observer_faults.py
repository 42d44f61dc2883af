"""An observer that is frozen, killed, or whose disk is full: requests notice nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.faults.cluster import Cluster
from tests.support.servers import free_port

TOKENS = 30
FULL = "/dev/full"
"""A file that takes no byte."""


def read(cluster: Cluster, path: str) -> dict[str, Any]:
    """Return what the observer answers."""
    (observer,) = cluster.ready("observer")
    with urlopen(f"{observer.address}{path}", timeout=20) as page:
        return dict(json.load(page))


async def requests_in_the_hour(cluster: Cluster) -> int:
    report = await asyncio.to_thread(read, cluster, "/slo")
    return int(report["windows"][0]["requests"])


async def test_requests_notice_nothing_of_a_frozen_or_killed_observer(
    tiny_model: Path, tmp_path: Path
) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}"}  # nobody listens
    flags = ("--observer",)
    with Cluster(tiny_model, tmp_path, workers=2, flags=flags, environ=environ) as cluster:
        texts = await cluster.texts(range(8), TOKENS)
        await cluster.wait_for(lambda: cluster.ready("observer"))
        (before,) = cluster.ready("observer")
        pid = before.pid
        for number in (signal.SIGSTOP, signal.SIGKILL):

            async def hit(number: int = number) -> None:
                os.kill(pid, number)

            answers = await cluster.ask_during(hit, streams=8, tokens=TOKENS)
            assert all(answer.complete for answer in answers)
            assert {answer.key: answer.text for answer in answers} == texts
        await cluster.wait_for(
            lambda: [each.pid for each in cluster.ready("observer")] not in ([], [pid])
        )
        assert cluster.ready("observer")[0].address == before.address  # open pages find it
        while await requests_in_the_hour(cluster) != 24:
            await asyncio.sleep(0.2)


async def test_an_observer_that_is_replaced_keeps_its_port(
    tiny_model: Path, tmp_path: Path
) -> None:
    flags = ("--observer", "--observer.port", str(free_port()))
    with Cluster(tiny_model, tmp_path, workers=1, flags=flags) as cluster:
        await cluster.wait_for(lambda: cluster.ready("observer"))
        (before,) = cluster.ready("observer")
        assert before.address.endswith(flags[-1])
        code, shown = await cluster.try_command("restart", "observer")
        assert code == 0, shown
        (after,) = cluster.ready("observer")
        assert (after.pid != before.pid, after.address) == (True, before.address)
        assert await requests_in_the_hour(cluster) == 0
        os.kill(after.pid, signal.SIGKILL)
        await cluster.wait_for(
            lambda: [each.pid for each in cluster.ready("observer")] not in ([], [after.pid])
        )
        assert cluster.ready("observer")[0].address == before.address
        assert await requests_in_the_hour(cluster) == 0


async def test_requests_notice_nothing_of_twenty_scrapers(tiny_model: Path, tmp_path: Path) -> None:
    with Cluster(tiny_model, tmp_path, workers=2, flags=("--observer",)) as cluster:
        texts = await cluster.texts(range(4), TOKENS)
        await cluster.wait_for(lambda: cluster.ready("observer"))
        (observer,) = cluster.ready("observer")
        ports = [f"http://127.0.0.1:{cluster.port}/metrics", f"{observer.address}/metrics"]

        def scrape(url: str) -> None:
            with urlopen(url, timeout=20) as page:
                assert page.status == 200

        async def hit() -> None:
            await asyncio.gather(*(asyncio.to_thread(scrape, url) for url in ports * 10))

        answers = await cluster.ask_during(hit, streams=4, tokens=TOKENS)
        assert {answer.key: answer.text for answer in answers} == texts


async def test_requests_notice_nothing_of_a_full_disk(tiny_model: Path, tmp_path: Path) -> None:
    books = tmp_path / "slo.sqlite"
    books.symlink_to(FULL)
    flags = ("--observer", "--observer.slo_file", str(books))
    with Cluster(tiny_model, tmp_path, workers=2, flags=flags) as cluster:
        answers = await cluster.ask_all(range(6), TOKENS)
        assert all(answer.complete for answer in answers)
        await cluster.wait_for(
            lambda: cluster.metrics(cluster.ready("observer")[0]).get(
                "dynamo_observer_slo_failures_total", 0
            )
        )
        code, shown = await cluster.try_command("slo")
        assert code == 1
        assert "the file of `dynamo slo` cannot be" in shown
        stories = await asyncio.to_thread(read, cluster, "/requests")
        assert len(stories["requests"]) == 6
        books.unlink()  # there is room again
        while await requests_in_the_hour(cluster) != 6:
            await asyncio.sleep(0.2)
