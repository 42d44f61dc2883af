"""Updates by generations: at every write, whatever happens, enough serves and nothing is mixed."""

from __future__ import annotations

from copy import deepcopy
from random import Random
from typing import Any

import msgspec
import pytest

from dynamo.operations.operator.desired import desired
from dynamo.operations.operator.generations import RoleCount, next_step, shrink
from dynamo.operations.operator.names import COMPONENT_LABEL, GENERATION_LABEL, TYPE_LABEL
from dynamo.operations.operator.view import Desired, Observed

ROLES = {"frontend": "frontend", "prefill": "prefill", "decode": "decode"}
MAX_ROUNDS = 400


class World:
    """A cluster that does what is ordered at once. Pods become ready and end by chance."""

    def __init__(self, rng: Random, sizes: dict[str, int]) -> None:
        self.rng = rng
        self.sizes = sizes
        self.graph: dict[str, Any] = {
            "metadata": {"name": "llm", "namespace": "lab", "uid": "u", "generation": 1},
            "spec": {},
        }
        self.items: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: list[dict[str, Any]] = []
        self.now = 1e9
        self.least = dict.fromkeys(sizes, 0)
        self.most = dict.fromkeys(sizes, 0)
        self.writes = 0
        self.change("v1")

    def change(self, image: str, **sizes: int) -> None:
        """Let the user write another manifest."""
        self.sizes = {**self.sizes, **sizes}
        containers = [{"name": "main", "image": image}]
        self.graph["spec"] = {
            "components": [
                {
                    "name": role, "type": kind, "replicas": self.sizes[role],
                    "podTemplate": {"spec": {"containers": deepcopy(containers)}},
                }
                for role, kind in ROLES.items()
            ]
        }  # fmt: skip
        self.graph["metadata"]["generation"] += 1
        for role, target in self.sizes.items():
            total = self.total(role)
            batch = max(1, -(-target // 4))
            self.least[role] = min(total, target)
            self.most[role] = max(total, target) + batch + 1

    def total(self, role: str) -> int:
        """Return the replicas that are ordered of a role."""
        return sum(
            item["spec"]["replicas"]
            for item in self.items.values()
            if item["metadata"]["labels"].get(COMPONENT_LABEL) == role
            and "replicas" in item["spec"]
        )

    def reconcile(self, crash_after: int = 1000) -> bool:
        """Let the operator run once, and end after so many writes. Returns whether it wrote."""
        pods = [*self.pods]
        wanted = desired(self.graph, Observed(self.now, dict(self.items), pods, secret=None))
        before = self.writes
        for number, write in enumerate(self.steps(wanted)):
            if number == crash_after:
                break
            write()
            self.writes += 1
            self.check()
        return self.writes > before

    def steps(self, wanted: Desired) -> list[Any]:
        """Return the writes that differ, in the order of the operator."""
        status = msgspec.to_builtins(wanted.status)

        def put_status() -> None:
            self.graph["status"] = status

        steps = [put_status] if wanted.status_first else []
        for key, replicas in wanted.scales:
            steps.append(lambda key=key, n=replicas: self.order(key, n))  # type: ignore[misc]
        for item in wanted.objects:
            if item["kind"] != "Deployment":
                continue
            key = (item["kind"], item["metadata"]["name"])
            live = self.items.get(key)
            if live is None or live["spec"] != item["spec"]:
                steps.append(lambda key=key, item=item: self.put(key, item))  # type: ignore[misc]
        steps += [lambda key=key: self.items.pop(key) for key in wanted.deletions]
        if self.graph.get("status") != status:
            steps.append(put_status)
        return steps

    def put(self, key: tuple[str, str], item: dict[str, Any]) -> None:
        """Create or change a Deployment."""
        live = self.items.get(key)
        new = deepcopy(item)
        new["metadata"]["creationTimestamp"] = (
            live["metadata"]["creationTimestamp"] if live else f"{self.writes:012d}"
        )
        new["status"] = (live or {}).get("status", {})
        new["metadata"]["generation"] = live["metadata"]["generation"] + 1 if live else 1
        self.items[key] = new

    def order(self, key: tuple[str, str], replicas: int) -> None:
        """Scale a Deployment."""
        item = deepcopy(self.items[key])
        item["spec"]["replicas"] = replicas
        item["metadata"]["generation"] += 1
        self.items[key] = item

    def live(self) -> None:
        """Let some pods start, become ready, and end."""
        self.now += 1
        self.pods = []
        for key, live in list(self.items.items()):
            item = deepcopy(live)
            wanted, status = item["spec"]["replicas"], item["status"]
            ready = min(status.get("readyReplicas", 0), wanted)
            ready += self.rng.randint(0, wanted - ready)
            ending = max(0, status.get("replicas", 0) - wanted) if self.rng.random() < 0.5 else 0
            item["status"] = {
                "observedGeneration": item["metadata"]["generation"], "replicas": wanted,
                "updatedReplicas": wanted, "readyReplicas": ready, "availableReplicas": ready,
            }  # fmt: skip
            labels = item["spec"]["template"]["metadata"]["labels"]
            pod = {"metadata": {"name": key[1], "labels": labels}, "status": {}}
            self.pods += [pod] * (wanted + ending)
            self.items[key] = item

    def check(self) -> None:
        """Assert what holds at every instant."""
        generations: dict[str, dict[str, int]] = {}
        for item in self.items.values():
            labels = item["metadata"]["labels"]
            part = generations.setdefault(labels[GENERATION_LABEL], {})
            part[labels[TYPE_LABEL]] = item["spec"]["replicas"]
        for role in self.sizes:
            total = self.total(role)
            assert self.least[role] <= total <= self.most[role], (role, total, generations)
        for part in generations.values():
            if part.get("frontend"):
                missing = [role for role, size in self.sizes.items() if size and not part.get(role)]
                assert not missing, generations

    def settle(self, *, crashes: bool = False) -> None:
        """Reconcile until nothing changes, and assert that the present manifest is served."""
        quiet = 0
        for _ in range(MAX_ROUNDS):
            crash = self.rng.randint(0, 4) if crashes and self.rng.random() < 0.5 else 1000
            if crashes and self.rng.random() < 0.1:
                self.graph.pop("status", None)
            wrote = self.reconcile(crash)
            state = self.graph.get("status", {}).get("state")
            quiet = quiet + 1 if not wrote and state == "successful" else 0
            if quiet > 3:
                break
            self.live()
        assert self.graph["status"]["state"] == "successful"
        assert len(self.items) == len(ROLES)
        assert {role: self.total(role) for role in self.sizes} == self.sizes


SIZES = [
    {"frontend": 1, "prefill": 1, "decode": 1},
    {"frontend": 2, "prefill": 4, "decode": 8},
    {"frontend": 1, "prefill": 3, "decode": 16},
]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes.values())))
def test_updates_keep_enough_of_all_roles(sizes: dict[str, int], seed: int) -> None:
    """An operator that ends after any write, or whose status is wiped, comes to the same end."""
    rng = Random(seed)
    world = World(rng, sizes)
    world.settle()
    world.change("v2")
    world.settle(crashes=seed % 2 == 1)
    world.change("v3", **{role: rng.randint(1, 2 * size) for role, size in sizes.items()})
    world.settle(crashes=True)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes.values())))
def test_an_update_that_is_taken_back_or_changed_midway(sizes: dict[str, int], seed: int) -> None:
    rng = Random(seed)
    world = World(rng, sizes)
    world.settle()
    for image in ("v2", rng.choice(["v1", "v3"]), "v4"):
        world.change(image)
        for _ in range(rng.randint(1, 12)):
            world.reconcile(rng.randint(0, 6))
            world.live()
    world.change("v1")
    world.settle(crashes=True)


def test_steps_keep_roles_in_proportion() -> None:
    roles = {"prefill": RoleCount(4, 4, 2, 2), "decode": RoleCount(8, 8, 4, 4)}
    step = next_step(roles, {})
    assert (step.number, step.count) == (2, 4)
    assert step.new == {"prefill": 3, "decode": 6}
    assert step.old == {"prefill": 2, "decode": 4}
    faster = next_step(roles, {"nvidia.com/deployment-rolling-update-max-surge": "100%"})
    assert faster.count == 1


def test_old_generations_go_whole_and_the_oldest_first() -> None:
    old = [{"prefill": 1, "decode": 3}, {"prefill": 2, "decode": 2}]
    assert shrink(old, {"prefill": 2, "decode": 3}) == [
        {"prefill": 1, "decode": 1},
        {"prefill": 2, "decode": 2},
    ]
    assert shrink(old, {"prefill": 0, "decode": 0})[0] == {"prefill": 0, "decode": 0}
