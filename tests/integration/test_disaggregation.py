"""Prefill and decode workers in real processes: texts, headers, roles, modes, routers, health."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.cluster import Cluster
from tests.faults.stream_client import Answer, ask

from dynamo.scheduling.router.harm_steering import START_WEIGHT

FILE = "router: {{mode: kv, disaggregation: {{mode: {mode}, prefill_length_threshold: 512}}}}\n"
TIMING = "constant:0.02,5"
LONG, SHORT = 300, 8
"""Words of prompts above and below the threshold."""
_keys = itertools.count(1000)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("settings") / "serve.yaml"


@pytest.fixture(scope="module")
def cluster(
    file: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    file.write_text(FILE.format(mode="always"))
    folder = tmp_path_factory.mktemp("pairs")
    flags = ("-f", str(file), "--runtime.namespace", "elsewhere")
    cluster = Cluster(
        tiny_model, folder, workers=0, prefill=1, decode=2, flags=flags, timing=TIMING
    )
    with cluster:
        yield cluster


def instances(cluster: Cluster, role: str) -> set[str]:
    return {record.instance for record in cluster.ready(role)}


def prefill_state(cluster: Cluster) -> str:
    """Return what /health says about prompts."""
    with urllib.request.urlopen(f"http://127.0.0.1:{cluster.port}/health", timeout=5) as page:
        return str(json.load(page)["prefill"].get("tiny"))


def unhealthy_reason(cluster: Cluster) -> str:
    """Return why /health reports the model as unhealthy."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{cluster.port}/health", timeout=5):
            return ""
    except urllib.error.HTTPError as error:
        return str(json.load(error)["reasons"].get("tiny"))


async def ask_new(cluster: Cluster, key: int, words: int) -> Answer:
    answer = await ask(cluster.port, key, 8, words=words)
    assert answer.complete, answer
    return answer


async def set_mode(
    cluster: Cluster, file: Path, mode: str, *, words: int = LONG, remote: bool
) -> None:
    """Change the mode in the watched file. Returns when new prompts of that length are computed by
    a prefill worker, or not any more."""
    file.write_text(FILE.format(mode=mode))
    end = time.monotonic() + 10
    while bool((await ask_new(cluster, next(_keys), words)).prefill_worker) != remote:
        assert time.monotonic() < end, cluster.log[-2000:]


async def test_a_prefill_worker_computes_the_prompt_and_the_text_is_the_same(
    cluster: Cluster, file: Path
) -> None:
    answers = [await ask_new(cluster, key, LONG) for key in range(4)]

    assert {answer.prefill_worker for answer in answers} == instances(cluster, "prefill_worker")
    assert {answer.worker for answer in answers} <= instances(cluster, "decode_worker")

    await set_mode(cluster, file, "off", remote=False)
    alone = [await ask_new(cluster, key, LONG) for key in range(4)]
    assert [answer.prefill_worker for answer in alone] == [""] * 4
    assert [answer.text for answer in alone] == [answer.text for answer in answers]
    await set_mode(cluster, file, "always", words=SHORT, remote=True)


async def test_thresholds_move_long_prompts_only(cluster: Cluster, file: Path) -> None:
    await set_mode(cluster, file, "thresholds", words=SHORT, remote=False)

    assert (await ask_new(cluster, 10, LONG)).prefill_worker
    await set_mode(cluster, file, "always", words=SHORT, remote=True)


async def test_roles_change_what_ps_shows_and_where_requests_go(cluster: Cluster) -> None:
    first, second = cluster.ready("decode_worker")
    await cluster.command("roles", first.name, "prefill")

    await cluster.wait_for(lambda: len(cluster.ready("prefill_worker")) == 2)
    await cluster.wait_for(lambda: prefill_state(cluster) == "2 prefill workers")
    answers = [await ask_new(cluster, key, LONG) for key in range(20, 24)]
    assert {answer.worker for answer in answers} == {second.instance}

    await cluster.command("roles", first.name, "decode")
    await cluster.wait_for(lambda: prefill_state(cluster) == "1 prefill worker")
    assert len(cluster.ready("decode_worker")) == 2


async def test_decode_workers_compute_prompts_while_there_is_no_prefill_worker(
    cluster: Cluster,
) -> None:
    (prefill,) = cluster.ready("prefill_worker")
    await cluster.command("roles", prefill.name, "decode")
    await cluster.wait_for(lambda: prefill_state(cluster).startswith("no prefill worker"))
    assert not (await ask_new(cluster, 30, LONG)).prefill_worker

    await cluster.command("roles", prefill.name, "prefill")
    await cluster.wait_for(lambda: prefill_state(cluster) == "1 prefill worker")
    assert (await ask_new(cluster, 31, LONG)).prefill_worker == prefill.instance


async def test_health_tells_of_a_mode_and_of_a_missing_decode_worker(
    cluster: Cluster, file: Path
) -> None:
    await set_mode(cluster, file, "off", remote=False)
    assert prefill_state(cluster).endswith("mode is off: decode workers compute prompts")
    await set_mode(cluster, file, "always", remote=True)

    names = [record.name for record in cluster.ready("decode_worker")]
    for name in names:
        await cluster.command("roles", name, "prefill")
    await cluster.wait_for(lambda: "3 prefill workers and no worker" in unhealthy_reason(cluster))
    answer = await ask(cluster.port, 40, 8, words=SHORT)
    assert "serving with another role" in answer.error
    for name in names:
        await cluster.command("roles", name, "decode")
    await cluster.wait_for(lambda: not unhealthy_reason(cluster))
    await ask_new(cluster, 41, LONG)


async def test_a_router_process_chooses_pairs_too(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--router-replicas", "1", "--disagg", "always")
    cluster = Cluster(
        tiny_model, tmp_path, workers=0, prefill=1, decode=1, flags=flags, timing=TIMING
    )
    with cluster:
        await cluster.wait_for(lambda: cluster.ready("router"))
        answer = await ask_new(cluster, 1, LONG)
        assert {answer.prefill_worker} == instances(cluster, "prefill_worker")

        os.kill(cluster.processes("router")[0].pid, signal.SIGKILL)
        answer = await ask_new(cluster, 2, LONG)
        assert {answer.worker} == instances(cluster, "decode_worker")


def test_always_without_a_prefill_worker_is_an_error_that_says_what_to_add(
    tiny_model: Path, runtime_environ: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "dynamo", "run", "out=mock", str(tiny_model)]
    ended = subprocess.run(
        [*command, "--workers", "2", "--disagg", "always", "--http-port", "0"],
        env=os.environ | runtime_environ,
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert ended.returncode == 2
    assert "no worker is a prefill worker" in ended.stderr
    assert "--prefill-workers N" in ended.stderr


async def test_a_router_process_steers_the_price_of_pauses_by_the_target(
    tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "steered.yaml"

    def set_target(milliseconds: float) -> None:
        steered = {"mode": "flexible", "itl_slo": milliseconds}
        router = {"mode": "kv", "replicas": 1, "port": 0, "disaggregation": steered}
        file.write_text(json.dumps({"router": router}))

    set_target(1.0)  # below a step of TIMING
    flags = ("-f", str(file), "--observer")
    with Cluster(tiny_model, tmp_path, workers=2, flags=flags, timing=TIMING) as cluster:
        await cluster.wait_for(lambda: cluster.ready("router"))

        (router,) = cluster.ready("router")

        async def weight_after_an_answer() -> float | None:
            await ask_new(cluster, next(_keys), SHORT)
            return cluster.metrics(router).get('dynamo_router_harm_weight_ratio{model="tiny"}')

        end = time.monotonic() + 20
        while (await weight_after_an_answer() or 0.0) <= START_WEIGHT:
            assert time.monotonic() < end, cluster.log[-2000:]
        await weight_after_an_answer()
        decisions: list[dict[str, float | None]] = [{}]
        while (decisions[-1].get("harm_weight") or 0.0) <= START_WEIGHT:
            assert time.monotonic() < end + 20, decisions
            decisions = json.loads(await cluster.command("explain", "--json")) or decisions
        assert decisions[-1]["itl_slo_ms"] == 1.0

        set_target(0.0)
        while await weight_after_an_answer() is not None:
            assert time.monotonic() < end, cluster.log[-2000:]
