"""Placement of gangs: best fit by levels, all or nothing, the queue, and the explanations."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.operations.operator.gangs import ScaledPart, graph_gangs
from dynamo.operations.placement.explain import describe_place, explain_refusal
from dynamo.operations.placement.fit import Gang, PodGroup, place, release
from dynamo.operations.placement.nodes import read_nodes
from dynamo.operations.placement.quantity import GPU, format_quantity, parse_quantity, pod_requests
from dynamo.operations.placement.queue import RESERVE_S, GangQueue
from dynamo.operations.placement.topology import HOST, Node, Topology

LEVELS = ("block", "rack", HOST)


def make_topology(blocks: int = 2, racks: int = 2, hosts: int = 4, gpus: int = 8) -> Topology:
    """Return hosts b0-r0-h0 and so on."""
    nodes = []
    for block in range(blocks):
        for rack in range(racks):
            for host in range(hosts):
                labels = {"block": f"b{block}", "rack": f"b{block}-r{rack}"}
                room = {GPU: gpus * 1000}
                nodes.append(Node(f"b{block}-r{rack}-h{host}", labels, room, room))
    return Topology(nodes, LEVELS)


def make_gang(name: str, *pods: int, **options: Any) -> Gang:
    """Return a gang of pods with these GPUs each."""
    groups = [
        PodGroup(f"g{gpus}", pods.count(gpus), {GPU: gpus * 1000})
        for gpus in sorted(set(pods), reverse=True)
    ]
    return Gang(name, groups, **options)


def free_gpus(topology: Topology) -> int:
    return topology.root.free[topology.resources[GPU]] // 1000


@pytest.mark.parametrize(
    ("text", "thousandths"),
    [
        ("2", 2000),
        ("500m", 500),
        ("1.5", 1500),
        (".5", 500),
        ("2Gi", 2 * 1024**3 * 1000),
        ("1e3", 10**6),
        ("1E3", 10**6),
        ("1E", 10**21),
        ("100n", 1),
        (4, 4000),
        ("-1", -1000),
    ],
)
def test_quantities_are_read_in_thousandths(text: Any, thousandths: int) -> None:
    assert parse_quantity(text) == thousandths


@pytest.mark.parametrize("text", ["", "two", "1 Gi", "1gi", "1e", "0x10", "1e99", "1.2.3", "GB"])
def test_what_is_no_quantity_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="no quantity"):
        parse_quantity(text)


def test_quantities_are_written_short() -> None:
    texts = [format_quantity(parse_quantity(text)) for text in ("2", "500m", "2Gi", "0", "1e3")]
    assert texts == ["2", "500m", "2Gi", "0", "1000"]


def test_a_pod_asks_for_its_containers_or_its_largest_init_container() -> None:
    spec = {
        "containers": [
            {"resources": {"limits": {GPU: "2"}, "requests": {"cpu": "500m"}}},
            {"resources": {"requests": {"cpu": "1"}}},
        ],
        "initContainers": [{"resources": {"requests": {"cpu": "4"}}}],
    }
    assert pod_requests(spec) == {"pods": 1000, GPU: 2000, "cpu": 4000}


def test_a_gang_is_placed_in_the_fullest_rack_that_takes_it() -> None:
    topology = make_topology()
    first = place(topology, make_gang("first", 8, 8))
    second = place(topology, make_gang("second", 8, 8))

    assert first is not None
    assert second is not None
    assert (first.level, second.domain) == ("rack", first.domain)


def test_unused_hosts_are_kept_whole() -> None:
    topology = make_topology(blocks=1)
    place(topology, make_gang("full", 8, 8, 8))  # a rack with one host left
    placed = place(topology, make_gang("part", 4, required="rack"))
    other = place(topology, make_gang("whole", 8, 8, 8, 8))
    assert placed is not None
    assert placed.pods[0].node.startswith("b0-r0")
    assert other is not None
    assert other.domain == "b0-r1"


def test_a_gang_that_no_rack_takes_goes_one_level_up_unless_the_rack_is_required() -> None:
    topology = make_topology()
    pods = [8] * 6
    assert place(topology, make_gang("strict", *pods, required="rack")) is None
    assert free_gpus(topology) == 128

    placed = place(topology, make_gang("loose", *pods))
    assert placed is not None
    assert placed.level == "block"
    racks = {pod.node.rpartition("-")[0] for pod in placed.pods}
    assert len(racks) == 2


def test_a_gang_is_placed_whole_or_not_at_all() -> None:
    topology = make_topology(blocks=1, racks=1)
    assert place(topology, make_gang("large", 8, 8, 8, 4, 4, 1)) is None
    assert free_gpus(topology) == 32
    placed = place(topology, make_gang("fits", 8, 8, 8, 4, 4))
    assert placed is not None
    release(topology, placed)
    assert free_gpus(topology) == 32


def test_a_group_may_be_narrower_than_its_gang() -> None:
    topology = make_topology(blocks=1)
    place(topology, make_gang("left", 8))
    groups = [
        PodGroup("prefill", 4, {GPU: 8000}, level="rack"),
        PodGroup("decode", 3, {GPU: 8000}, level="rack"),
    ]
    placed = place(topology, Gang("pair", groups))
    assert placed is not None
    racks = {
        group: {pod.node.rpartition("-")[0] for pod in placed.pods if pod.group == group}
        for group in ("prefill", "decode")
    }
    assert racks == {"prefill": {"b0-r1"}, "decode": {"b0-r0"}}


def test_pods_go_to_nodes_with_the_labels_that_they_select() -> None:
    room = {GPU: 8000}
    nodes = [Node(f"n{n}", {"gpu": "h100" if n else "a100"}, room, room) for n in range(2)]
    topology = Topology(nodes)
    group = PodGroup("g", 1, {GPU: 4000}, selector={"gpu": "a100"})
    assert place(topology, Gang("a", [group])).pods[0].node == "n0"  # type: ignore[union-attr]
    assert place(topology, Gang("b", [group, PodGroup("h", 1, {GPU: 8000})])) is not None
    assert place(topology, Gang("c", [PodGroup("h", 1, {GPU: 5000})])) is None


def test_a_level_that_no_node_has_is_named() -> None:
    with pytest.raises(ConfigError, match="no node has the label pod of gang") as error:
        place(make_topology(), make_gang("gang", 1, preferred="pod"))
    assert error.value.hint == "one of block, rack, kubernetes.io/hostname"


def test_the_queue_serves_by_priority_and_fills_gaps() -> None:
    topology = make_topology(blocks=1, racks=1)
    queue = GangQueue(topology)
    queue.add(make_gang("first", 8, 8, 8), 0)
    queue.add(make_gang("large", 8, 8), 1)
    queue.add(make_gang("small", 4), 2)
    queue.add(make_gang("urgent", 4, priority=1), 3)
    assert [placed.gang.name for placed in queue.step(3)] == ["urgent", "first", "small"]


def test_a_gang_that_waits_long_reserves_room() -> None:
    topology = make_topology(blocks=1, racks=1)
    queue = GangQueue(topology)
    for number in range(4):
        queue.add(make_gang(f"one-{number}", 8), 0)
    queue.step(0)
    queue.add(make_gang("large", 8, 8), 1)
    queue.remove("one-0")
    queue.add(make_gang("late", 8), 2 + RESERVE_S)
    assert not queue.step(2 + RESERVE_S)
    queue.remove("one-1")
    assert [placed.gang.name for placed in queue.step(3 + RESERVE_S)] == ["large"]


def test_further_replicas_wait_for_the_first_gang() -> None:
    parts = [
        ScaledPart("prefill", 3, {GPU: 8000}),
        ScaledPart("decode", 2, {GPU: 8000}, min_available=2),
    ]
    gangs = graph_gangs("graph", parts)
    assert [gang.name for gang in gangs] == ["graph", "graph-prefill-1", "graph-prefill-2"]
    topology = make_topology(blocks=1, racks=1, hosts=2)
    queue = GangQueue(topology)
    for gang in gangs:
        queue.add(gang, 0)
    assert not queue.step(0)  # the first one needs three hosts
    topology = make_topology(blocks=1, racks=1, hosts=4)
    queue = GangQueue(topology)
    for gang in gangs:
        queue.add(gang, 0)
    assert [placed.gang.name for placed in queue.step(0)] == ["graph", "graph-prefill-1"]


def test_replicas_of_several_nodes_stay_within_a_rack() -> None:
    parts = [ScaledPart("decode", 3, {GPU: 8000}, min_available=3, nodes=2, level="rack")]
    (gang,) = graph_gangs("graph", parts)
    placed = place(make_topology(), gang)
    assert placed is not None
    for number in range(3):
        nodes = [pod.node for pod in placed.pods if pod.group == f"decode-{number}"]
        assert len(nodes) == 2
        assert len({node.rpartition("-")[0] for node in nodes}) == 1


def test_a_random_life_of_gangs_leaves_none_in_part_and_none_starving() -> None:
    rng, topology = random.Random(7), make_topology(blocks=2, racks=2, hosts=4)
    queue, now, number = GangQueue(topology), 0.0, 0
    shapes = ([8] * 2, [4] * 4, [2] * 8, [8] * 4, [1] * 6, [2] * 3, [8, 4, 4])
    longest = 0.0
    for _ in range(3000):
        now += rng.expovariate(1 / 3)
        event = rng.random()
        if event < 0.5 and len(queue.waiting) < 20:
            number += 1
            gang = make_gang(f"gang-{number}", *rng.choice(shapes), priority=rng.randrange(2))
            queue.add(gang, now)
        elif queue.running:
            queue.remove(rng.choice(list(queue.running)))
        queue.step(now)
        for placed in queue.running.values():
            assert len(placed.pods) == sum(group.count for group in placed.gang.groups)
        waits = [now - entry.since for entry in queue.waiting if entry.gang.priority]
        longest = max([longest, *waits])
        for host in topology.hosts.values():
            assert all(amount >= 0 for amount in host.free)
    assert number > 1000
    assert longest < 1000
    for name in list(queue.running):
        queue.remove(name)
    assert topology.root.free == topology.root.capacity


def test_a_refusal_says_what_each_domain_lacks() -> None:
    topology = make_topology(blocks=1)
    place(topology, make_gang("busy", 8, 8, 8, 8))
    lines = explain_refusal(topology, make_gang("large", *[8] * 5))
    assert lines == [
        "large: waits, no domain takes all of its pods",
        "  rack b0-r1 lacks 8 nvidia.com/gpu",
        "  rack b0-r0 lacks 40 nvidia.com/gpu",
        "  block b0 lacks 8 nvidia.com/gpu",
        "  cluster lacks 8 nvidia.com/gpu",
    ]
    lines = explain_refusal(topology, make_gang("wide", 16, required="rack"))
    assert lines[1:] == [
        "  rack b0-r1: no host takes a pod of g16 (16 nvidia.com/gpu)",
        "  rack b0-r0 lacks 16 nvidia.com/gpu",
    ]
    gang = Gang("odd", [PodGroup("worker", 1, {"amd.com/gpu": 1000})])
    assert explain_refusal(topology, gang)[1:] == ["  no node has amd.com/gpu, which worker needs"]


def test_a_place_is_described_by_node() -> None:
    placed = place(make_topology(), make_gang("gang", 4, 4, 8))
    assert placed is not None
    assert describe_place(placed) == [
        "gang: 3 pods in rack b0-r0",
        "  b0-r0-h0: 1 g8",
        "  b0-r0-h1: 2 g4",
    ]


def test_nodes_are_read_with_what_their_pods_leave_free() -> None:
    pod = {"containers": [{"resources": {"limits": {GPU: "3"}}}], "nodeName": "a"}
    objects: list[dict[str, Any]] = [
        {"kind": "Node", "metadata": {"name": "a"}, "status": {"allocatable": {GPU: "8"}}},
        {"kind": "Node", "metadata": {"name": "b"}, "spec": {"unschedulable": True}},
        {
            "kind": "Node",
            "metadata": {"name": "c"},
            "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]},
        },
        {"kind": "Pod", "metadata": {"name": "p"}, "spec": pod},
        {"kind": "Pod", "metadata": {"name": "q"}, "spec": pod, "status": {"phase": "Failed"}},
    ]
    (node,) = read_nodes(objects)
    assert node.free == {"pods": 109_000, GPU: 5000}
    objects[0]["status"]["allocatable"][GPU] = "many"
    with pytest.raises(ConfigError, match="Node a: 'many' is no quantity"):
        read_nodes(objects)
