"""Every connector of the planner keeps the promises of the interface."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace
from tests.support.kubernetes import account_environment
from tests.support.kubernetes_graphs import GraphCluster, component, graph
from tests.support.planner_cluster import TIMING, Cluster

from dynamo.communication.discovery import open_discovery
from dynamo.communication.kubernetes.link import open_link
from dynamo.communication.requests import ResponseWriter
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import EngineInfo
from dynamo.operations.planner.connectors.connector import Connector
from dynamo.operations.planner.connectors.kubernetes import KubernetesConnector
from dynamo.operations.planner.connectors.local import LocalConnector
from dynamo.operations.planner.connectors.simulated import SimulatedConnector
from dynamo.operations.planner.connectors.virtual import (
    REPORTS_PREFIX,
    TARGETS_PREFIX,
    VirtualConnector,
    VirtualReport,
)
from dynamo.operations.planner.values import KindState, Order
from dynamo.operations.replay.fast.replay import FastReplay
from dynamo.operations.replay.fleet import ReplayFleet, Startup
from dynamo.operations.replay.replay import ReplayPlan
from dynamo.operations.replay.workers import ReplayGroup, ReplayWorkers
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.deployment import Deployment
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.supervisor import Supervisor
from dynamo_conformance.planner import ConnectorConformance, Settle

CHILD = """
import json, os, signal
os.read(0, 1 << 20)
os.write(0, b'{"state": "ready"}\\n')
signal.pause()
"""


class TestFakeCluster(ConnectorConformance):
    """The cluster of the planner's tests."""

    @pytest.fixture
    def connector(self) -> Cluster:
        return Cluster({"worker": KindState(2)})

    @pytest.fixture
    def settle(self, connector: Cluster) -> Settle:
        async def settle() -> None:
            connector.now_s += 5.0

        return settle


class TestSimulated(ConnectorConformance):
    """The workers of a fast replay."""

    @pytest.fixture
    def connector(self) -> Connector:
        workers = ReplayWorkers(
            [ReplayGroup(2, EngineInfo("mock", 64, 100, 4096, 8, 512), TIMING)], "lru"
        )
        plan = ReplayPlan("test", workers, RouterSettings(), startup=Startup(30.0, 30.0))
        fleets: list[ReplayFleet] = []
        FastReplay(plan, drive=fleets.append).run([])
        self.heap = fleets[0].clock
        return SimulatedConnector(fleets[0], workers, 30.0)

    @pytest.fixture
    def settle(self) -> Settle:
        async def settle() -> None:
            self.heap.stopped = False  # type: ignore[attr-defined]
            self.heap.run()  # type: ignore[attr-defined]

        return settle


class TestVirtual(ConnectorConformance):
    """A program that follows the orders in discovery."""

    @pytest.fixture
    async def connector(self) -> AsyncIterator[Connector]:
        self.plane = plane = await open_discovery("memory:planner-virtual")
        self.size = self.number = 0
        settings = replace(Settings(), runtime=replace(Settings().runtime, namespace="test"))
        self.cluster = Cluster({"worker": KindState(2)}, start_s=2.0, drain_s=1.0)
        await self.report()
        runtime = SimpleNamespace(settings=settings, discovery=plane)
        yield VirtualConnector(runtime)  # type: ignore[arg-type]
        await plane.close()

    async def report(self) -> None:
        report = VirtualReport(self.cluster.states()["worker"], self.number)
        await self.plane.put(f"{REPORTS_PREFIX}test/worker", msgspec.json.encode(report))

    @pytest.fixture
    def settle(self) -> Settle:
        async def settle() -> None:
            self.cluster.now_s += 1.0
            for value in (await self.plane.get(f"{TARGETS_PREFIX}test/")).values():
                order = msgspec.json.decode(value, type=Order)
                await self.cluster.scale(order)
                self.number = order.number
            await self.report()

        return settle


class TestKubernetes(ConnectorConformance):
    """An operator that follows the adapters of a graph."""

    @pytest.fixture
    async def connector(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[Connector]:
        nodes = {"node": {"nvidia.com/gpu": "8"}}
        async with GraphCluster(tmp_path, nodes) as cluster:
            await cluster.operator()
            worker = component("worker", "worker", 2, scalingAdapter={})
            limits = {"limits": {"nvidia.com/gpu": 1}}
            worker["podTemplate"]["spec"]["containers"][0]["resources"] = limits
            await cluster.apply(graph(component("Planner", "planner"), worker))
            await cluster.until(lambda: cluster.state() == "successful")
            monkeypatch.setenv("DYN_PARENT_DGD_K8S_NAME", "llm")
            monkeypatch.setenv("DYN_PARENT_DGD_K8S_NAMESPACE", "default")
            token = cluster.server.access.account_token("default", "llm-planner")
            environ = account_environment(cluster.server.url, token, tmp_path / "planner")
            connector = KubernetesConnector(link=open_link(5.0, environ))
            yield connector
            await connector.close()
            assert not cluster.server.access.refused

    @pytest.fixture
    def settle(self) -> Settle:
        async def settle() -> None:
            await asyncio.sleep(0.01)

        return settle


class TestLocal(ConnectorConformance):
    """A supervisor with tiny real children."""

    @pytest.fixture
    async def connector(self, tmp_path: Path) -> AsyncIterator[LocalConnector]:
        deployment = Deployment("test", tmp_path / "test")
        url = deployment.discovery_url
        runtime = replace(Settings().runtime, discovery=url, deployment="test", drain_s=5.0)
        settings = replace(Settings(), runtime=runtime)
        command = (sys.executable, "-S", "-c", CHILD)
        specs = [
            ChildSpec(role="worker", name=f"worker-{number}", settings=settings, command=command)
            for number in (1, 2)
        ]
        supervisor = Supervisor(specs, deployment, settings)
        async with BackgroundTasks() as tasks:
            running = tasks.start(supervisor.run())
            await supervisor.ready.wait()
            async with await DistributedRuntime.create(settings, role="planner") as joined:
                joined.supervisor = f"{supervisor._record_writer.record.instance}/planner"
                connector = LocalConnector(joined)
                connector._folder = deployment.folder
                while math.isnan(await self.ready(connector)):
                    await asyncio.sleep(0.01)
                yield connector
            supervisor.stop()
            await running

    async def ready(self, connector: Connector) -> float:
        kinds = await connector.observe()
        return 2.0 if "worker" in kinds and kinds["worker"].ready == 2 else math.nan

    @pytest.fixture
    def settle(self) -> Settle:
        async def settle() -> None:
            await asyncio.sleep(0.01)

        return settle

    async def test_workers_of_embeddings_are_not_planned(
        self, connector: LocalConnector, settle: Settle
    ) -> None:
        runtime = connector._runtime
        embed = runtime.namespace().component("embedder").endpoint("embed")
        supervisor = runtime.supervisor.partition("/")[0]
        served = await embed.serve(echo, capabilities={"supervisor": f"{supervisor}/worker"})
        assert await connector.observe() == {}
        await served.withdraw()


async def echo(payload: bytes, outgoing: ResponseWriter) -> None:
    outgoing.send(payload)
