"""A graph under load on a cluster whose pods are processes: updates, sizes, faults."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.graph_processes import GraphProcesses, Load, make_graph

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl"),
    pytest.mark.timeout(300),
]
STREAMS = 6


@pytest.fixture
async def pods() -> AsyncIterator[GraphProcesses]:
    async with GraphProcesses({"n1": {}, "n2": {}}) as pods:
        pods.cluster.proxy.lag_s = 1.0
        yield pods


async def test_updates_and_sizes_break_no_stream(pods: GraphProcesses, tiny_model: Path) -> None:
    await pods.apply(make_graph(tiny_model))
    await pods.until(lambda: pods.is_successful("llm"))
    before = pods.runs("work")
    await asyncio.sleep(pods.cluster.proxy.lag_s)
    async with Load(pods, STREAMS) as load:
        await load.more(STREAMS)
        await pods.apply(make_graph(tiny_model, VERSION="2"))
        await pods.until(lambda: pods.is_successful("llm"))
        assert not set(before) & set(pods.runs("work"))
        await pods.apply(make_graph(tiny_model, VERSION="2", workers=1))
        await pods.until(lambda: len(pods.cluster.kubelet.runs) == 3)
        await load.more(STREAMS)
        await pods.apply(make_graph(tiny_model, VERSION="2", image="missing:1", workers=1))
        await pods.until(lambda: "ImagePullBackOff" in str(pods.graph("llm")["status"]))
        await load.more(STREAMS)
    load.assert_unaffected()
    assert not pods.server.access.refused


async def test_faults_break_no_stream(pods: GraphProcesses, tiny_model: Path) -> None:
    await pods.apply(make_graph(tiny_model))
    await pods.until(lambda: pods.is_successful("llm"))
    await asyncio.sleep(pods.cluster.proxy.lag_s)
    async with Load(pods, STREAMS) as load:
        await load.more(STREAMS)
        pods.runs("work")[0].containers[0].kill("OOMKilled")
        await pods.until(lambda: not pods.is_successful("llm"))
        await pods.until(lambda: pods.is_successful("llm"))
        await pods.server.stop()
        pods.runs("work")[1].containers[0].kill()
        await load.more(3 * STREAMS)
        await pods.server.start()
        await pods.until(lambda: pods.runs("work")[1].containers[0].ready)
        pods.runs("work")[0].evict("The node was low on resource: memory.")
        await pods.until(lambda: len(pods.runs("work")) == 3)
        await pods.until(lambda: pods.is_successful("llm"))
        await load.more(STREAMS)
    load.assert_unaffected()
    assert not pods.server.access.refused


async def test_the_planner_of_a_graph_sets_its_sizes(
    pods: GraphProcesses, tiny_model: Path
) -> None:
    document = '{"environment": "kubernetes", "ttft_ms": 500, "min_endpoint": 2}'
    main = {
        "name": "main",
        "image": "dynamo:1",
        "command": ["python3", "-m", "dynamo.planner"],
        "args": ["--config", document],
    }
    planned = make_graph(tiny_model, workers=1)
    front, work = planned["spec"]["components"]
    front["replicas"], work["scalingAdapter"] = 1, {}
    template = {"spec": {"containers": [main]}}
    planner = {"name": "plan", "type": "planner", "podTemplate": template}
    planned["spec"]["components"].append(planner)
    await pods.apply(planned)
    await pods.until(lambda: [run.containers[0].ready for run in pods.runs("work")] == [True] * 2)
    await pods.until(lambda: pods.is_successful("llm"))
    assert not pods.server.access.refused


async def test_a_lost_node_breaks_streams_of_its_frontends_alone(
    pods: GraphProcesses, tiny_model: Path
) -> None:
    await pods.apply(make_graph(tiny_model))
    await pods.until(lambda: pods.is_successful("llm"))
    await asyncio.sleep(pods.cluster.proxy.lag_s)
    node = pods.runs("work")[0].node
    async with Load(pods, STREAMS) as load:
        await load.more(STREAMS)
        await pods.cluster.kubelet.lose_node(node)
        await pods.until(lambda: not pods.is_successful("llm"))
        await pods.until(lambda: pods.is_successful("llm"))
        await load.more(STREAMS)
        during, load.answers = load.answers, []
        await load.more(STREAMS)
    load.assert_unaffected()
    assert {run.node for run in pods.runs("work")} == {"n1", "n2"} - {node}
    broken = [answer for answer in during if not answer.complete]
    assert all(answer.error.startswith("connection") for answer in broken), broken
