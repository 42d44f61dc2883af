"""The operator ends after each of its writes in turn, or loses that write's answer: always the same
end, and at every instant enough of all roles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.kubernetes_graphs import GRAPHS, GraphCluster, component, graph

from dynamo.core.errors import PlaneUnavailable
from dynamo.operations.operator.names import COMPONENT_LABEL, GENERATION_LABEL, TYPE_LABEL
from dynamo.services.operator.loop import OperatorLoop
from dynamo.testing.kubernetes.store import Change

DEPLOYMENTS = "deployments.apps"
Sizes = Mapping[str, int]


class CrashPoint:
    """Stops a link at a write: after it is done, nothing more is sent. `lost`: its answer is lost
    instead, and the operator lives on."""

    def __init__(self, link: Any, number: int, *, lost: bool) -> None:
        self.reached = asyncio.Event()
        self.writes = 0
        self._number = number
        self._lost = lost
        self._request = link.request
        link.request = self._send

    async def _send(self, method: str, path: str, *args: Any, **options: Any) -> bytes:
        if method == "GET" or "dryRun" in path or path.endswith("/events"):
            return bytes(await self._request(method, path, *args, **options))
        if self.reached.is_set() and not self._lost:
            await asyncio.Event().wait()
        self.writes += 1
        answer = await self._request(method, path, *args, **options)
        if self.writes == self._number:
            self.reached.set()
            if self._lost:
                raise PlaneUnavailable("the answer was lost")
            await asyncio.Event().wait()
        return bytes(answer)


class Bounds:
    """Checks at every change of a Deployment that its graph has enough and not too much."""

    def __init__(self, cluster: GraphCluster) -> None:
        self._cluster = cluster
        self.breaches: list[str] = []
        self._bounds: dict[str, tuple[int, int]] = {}
        cluster.server.store.watchers.setdefault(DEPLOYMENTS, set()).add(self._on_change)

    def expect(self, old: Sizes, new: Sizes) -> None:
        """Set the bounds of an update."""
        self._bounds = {
            role: (min(old[role], new[role]), max(old[role], new[role]) + -(-new[role] // 4) + 1)
            for role in new
        }

    def lift(self) -> None:
        """Check nothing."""
        self._bounds = {}

    def _on_change(self, change: Change) -> None:
        del change
        totals: dict[str, int] = {}
        generations: dict[str, dict[str, int]] = {}
        for item in self._cluster.items(DEPLOYMENTS):
            labels, count = item["metadata"]["labels"], item["spec"]["replicas"]
            totals[labels[COMPONENT_LABEL]] = totals.get(labels[COMPONENT_LABEL], 0) + count
            generations.setdefault(labels[GENERATION_LABEL], {})[labels[TYPE_LABEL]] = count
        for role, (least, most) in self._bounds.items():
            if not least <= totals.get(role, 0) <= most:
                self.breaches.append(f"{role} {totals} not in {least}..{most}: {generations}")
        for part in generations.values():
            if self._bounds and part.get("frontend") and not part.get("decode"):
                self.breaches.append(f"a role is missing: {generations}")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[GraphCluster]:
    async with GraphCluster(tmp_path) as cluster:
        yield cluster


def manifest(image: str, frontends: int = 1, decoders: int = 2) -> dict[str, Any]:
    return graph(
        component("Frontend", "frontend", frontends, image),
        component("decode", "decode", decoders, image),
    )


def is_served(cluster: GraphCluster, image: str, frontends: int, decoders: int) -> bool:
    """Whether exactly what a manifest says is there, and ready."""
    items = cluster.items(DEPLOYMENTS)
    sizes = {
        item["metadata"]["labels"][COMPONENT_LABEL]: item["spec"]["replicas"] for item in items
    }
    images = {item["spec"]["template"]["spec"]["containers"][0]["image"] for item in items}
    return (
        cluster.state() == "successful"
        and len(items) == 2
        and images == {image}
        and sizes == {"frontend": frontends, "decode": decoders}
        and len(cluster.items("pods")) == frontends + decoders
    )


async def run_with_crash(
    cluster: GraphCluster, point: int, item: dict[str, Any], done: Any, *, lost: bool
) -> bool:
    """Apply a manifest to an operator that ends at a write, and let another go on. Returns whether
    there was such a write."""
    loop: OperatorLoop = await cluster.operator()
    crash = CrashPoint(cluster.link_of(loop), point, lost=lost)
    await cluster.apply(item)
    await cluster.until(lambda: crash.reached.is_set() or (done() and loop.is_idle))
    reached = crash.reached.is_set()
    if reached and not lost:
        await cluster.kill(loop)
        loop = await cluster.operator()
    await cluster.until(done)
    await cluster.until(lambda: loop.is_idle)
    await cluster.kill(loop)
    return reached


@pytest.mark.parametrize("lost", [False, True], ids=["killed", "answer-lost"])
async def test_creation_scaling_update_and_deletion(cluster: GraphCluster, lost: bool) -> None:
    bounds = Bounds(cluster)
    steps = [("v1", 1, 2), ("v1", 2, 1), ("v2", 1, 2)]
    reached = [True] * len(steps)
    point = 0
    while any(reached):
        point += 1
        before: Sizes = {}
        for number, (image, frontends, decoders) in enumerate(steps):
            sizes = {"frontend": frontends, "decode": decoders}
            if before:
                bounds.expect(before, sizes)
            reached[number] = await run_with_crash(
                cluster,
                point,
                manifest(image, frontends, decoders),
                lambda: is_served(cluster, image, frontends, decoders),  # noqa: B023
                lost=lost,
            )
            assert not bounds.breaches
            before = sizes
        bounds.lift()
        await cluster.client.send("DELETE", f"{GRAPHS}/llm")
        await cluster.until(lambda: not cluster.items(DEPLOYMENTS) and not cluster.items("pods"))
    assert point > 12


async def test_an_update_that_is_taken_back_at_each_write(cluster: GraphCluster) -> None:
    bounds = Bounds(cluster)
    loop = await cluster.operator()
    sizes = {"frontend": 1, "decode": 2}
    await cluster.apply(manifest("v1"))
    await cluster.until(lambda: is_served(cluster, "v1", 1, 2))
    await cluster.kill(loop)
    bounds.expect(sizes, sizes)
    point, reached = 0, True
    while reached:
        point += 1
        loop = await cluster.operator()
        crash = CrashPoint(cluster.link_of(loop), point, lost=False)
        await cluster.apply(manifest("v2"))
        await cluster.until(lambda: crash.reached.is_set() or is_served(cluster, "v2", 1, 2))  # noqa: B023
        reached = crash.reached.is_set()
        await cluster.kill(loop)
        loop = await cluster.operator()
        await cluster.apply(manifest("v1"))
        await cluster.until(lambda: is_served(cluster, "v1", 1, 2) and loop.is_idle)  # noqa: B023
        await cluster.kill(loop)
        assert not bounds.breaches
    assert point > 5
