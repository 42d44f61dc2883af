"""Models that are loaded when they are wanted: when they are loaded, and which makes room."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace
from tests.support.loading_host import GB, KEEP_ALIVE_S, LONG_S, Child, Demand, Host

from dynamo.core.errors import ConfigError, ModelUnavailable
from dynamo.core.settings import Settings
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.processes.model_loader import QUIET_S, RUN_SHARE
from dynamo.runtime.supervisors import IN_USE, WAITING, LoadRecord


@pytest.fixture
async def tasks() -> AsyncIterator[BackgroundTasks]:
    async with BackgroundTasks() as owner:
        yield owner


@pytest.fixture
async def roomy(tasks: BackgroundTasks) -> Host:
    return Host(tasks)


@pytest.fixture
async def small(tasks: BackgroundTasks) -> Host:
    """A host with room for one of two models, `a` and `b`."""
    host = Host(tasks, limit_bytes=GB)
    host.add("a")
    host.add("b")
    return host


async def test_a_model_is_loaded_once_when_it_is_wanted_and_leaves_when_it_was_idle(
    roomy: Host,
) -> None:
    roomy.add("a")
    await roomy.settle(LONG_S)
    assert (roomy.states, roomy.processes.started) == ({"a": "unloaded"}, [])
    roomy.uses["a/other"] = WAITING
    await roomy.use(a=WAITING)
    assert roomy.states == {"a": "loading"}
    await roomy.complete_start("a", load_s=2.5)
    assert roomy.loader.records["a"] == LoadRecord("loaded", load_s=2.5)
    del roomy.uses["a/other"]
    await roomy.use(a=None)
    await roomy.settle(KEEP_ALIVE_S / 2)
    await roomy.use(a=IN_USE)
    await roomy.use(a=None)
    await roomy.settle(KEEP_ALIVE_S / 2)
    assert roomy.leaving == set(), "it was used since"
    await roomy.settle(KEEP_ALIVE_S / 2)
    await roomy.complete_stop("a")
    assert (roomy.states, roomy.processes.children) == ({"a": "unloaded"}, [])
    assert roomy.processes.started == ["a"]


async def test_a_model_stays_while_a_frontend_or_a_worker_has_a_request(roomy: Host) -> None:
    roomy.add("a", keep_alive=0.0)
    await roomy.load("a", then=IN_USE)
    await roomy.settle(LONG_S)
    roomy.child("a").calls = 1
    await roomy.use(a=None)
    await roomy.settle(LONG_S)
    assert roomy.leaving == set()
    roomy.child("a").calls = 0
    await roomy.settle(0.1)
    assert roomy.leaving == {"a"}


async def test_without_time_to_stay_a_model_serves_the_request_that_caused_its_load(
    roomy: Host,
) -> None:
    roomy.add("a", keep_alive=0.0)
    await roomy.use(a=WAITING)
    await roomy.complete_start("a")
    await roomy.settle(LONG_S)
    assert roomy.leaving == set(), "the request has not come yet"
    await roomy.use(a=None)
    await roomy.settle(0.1)
    assert roomy.leaving == {"a"}


async def test_a_request_for_a_leaving_model_loads_it_again(roomy: Host) -> None:
    roomy.add("a", keep_alive=0.0)
    await roomy.load("a")
    await roomy.settle(0.1)
    await roomy.use(a=WAITING)
    assert roomy.processes.started == ["a"]
    await roomy.complete_stop("a")
    assert roomy.processes.started == ["a", "a"]


async def test_the_model_that_was_used_least_recently_makes_room(tasks: BackgroundTasks) -> None:
    host = Host(tasks, limit_bytes=3 * GB)
    for name in "abcd":
        host.add(name)
    for name in "abc":
        await host.load(name)
        await host.settle(1.0)
    await host.use(a=IN_USE)
    await host.use(a=None)
    await host.settle(1.0)
    await host.use(d=WAITING)
    assert host.leaving == {"b"}
    await host.complete_stop("b")
    assert host.states == {"a": "loaded", "b": "unloaded", "c": "loaded", "d": "loading"}


async def test_room_is_counted_in_bytes(tasks: BackgroundTasks) -> None:
    host = Host(tasks, limit_bytes=4 * GB)
    for name, size in (("a", GB), ("b", GB), ("c", GB), ("big", 3 * GB)):
        host.add(name, memory=size)
    for name in "abc":
        await host.load(name)
        await host.settle(1.0)
    assert host.leaving == set(), "three small ones fit"
    await host.use(big=WAITING)
    assert host.leaving == {"a", "b"}, "two have to leave for a large one"
    await host.complete_stop("a")
    assert host.states["big"] == "unloaded"
    await host.complete_stop("b")
    assert host.states == {"a": "unloaded", "b": "unloaded", "c": "loaded", "big": "loading"}


async def test_a_model_that_answers_is_not_stopped_for_another_one(small: Host) -> None:
    await small.load("a", then=IN_USE)
    small.child("a").calls = 1
    await small.use(b=WAITING)
    await small.settle(LONG_S)
    assert small.states["a"] == "leaving", "it gets no further requests"
    await small.settle(LONG_S)
    assert small.leaving == set(), "it still answers"
    assert "1024 MiB" in small.loader.records["b"].reason
    small.child("a").calls = 0
    await small.settle(QUIET_S / 2)
    assert small.leaving == set(), "a frontend may have sent one before it knew"
    await small.settle(QUIET_S)
    assert small.leaving == {"a"}
    await small.complete_stop("a")
    assert small.states["b"] == "loading"


async def test_a_model_that_loads_is_not_stopped_for_another_one(small: Host) -> None:
    await small.use(a=WAITING)
    await small.use(a=None)
    await small.use(b=WAITING)
    await small.settle(LONG_S)
    assert (small.leaving, small.states["b"]) == (set(), "unloaded")
    await small.complete_start("a")
    await small.settle(0.1)
    assert small.leaving == {"a"}, "nobody waits for it any more"


async def test_a_model_is_not_stopped_before_the_request_that_caused_its_load(small: Host) -> None:
    await small.use(a=WAITING, b=WAITING)
    assert small.processes.started == ["a"]
    await small.complete_start("a")
    await small.settle(LONG_S)
    assert (small.leaving, small.states["a"]) == (set(), "loaded")
    await small.use(a=IN_USE)
    assert small.states["a"] == "leaving"


async def test_two_wanted_at_once_are_both_loaded_where_both_fit(roomy: Host) -> None:
    roomy.add("a")
    roomy.add("b")
    await roomy.use(a=WAITING, b=WAITING)
    assert sorted(roomy.processes.started) == ["a", "b"]
    await roomy.complete_start("b")
    await roomy.complete_start("a")
    assert roomy.states == {"a": "loaded", "b": "loaded"}


async def test_two_in_demand_take_turns_and_each_serves_its_queue(small: Host) -> None:
    await small.use(a=WAITING, b=WAITING)
    for name, other in (("a", "b"), ("b", "a"), ("a", "b")):
        await small.complete_start(name, load_s=2.0)
        await small.settle(LONG_S)
        assert small.states == {name: "loaded", other: "unloaded"}, "its queue is not served"
        await small.use(**{name: IN_USE})
        await small.settle(2 * QUIET_S)
        await small.use(**{name: WAITING})
        await small.complete_stop(name)
    assert small.processes.started == ["a", "b", "a", "b"]


async def test_a_model_in_demand_runs_for_a_share_of_the_time_of_its_load(small: Host) -> None:
    await small.use(a=WAITING)
    await small.complete_start("a", load_s=20.0)
    await small.use(a=IN_USE, b=WAITING)
    await small.settle(20.0 * RUN_SHARE - 1.0)
    assert small.states["a"] == "loaded"
    await small.settle(1.0)
    assert small.states["a"] == "leaving"


async def test_half_of_the_models_in_demand_go_on_while_others_take_their_turn(
    tasks: BackgroundTasks,
) -> None:
    host = Host(tasks, limit_bytes=2 * GB)
    for name in "abcd":
        host.add(name)
    await host.load("a", then=IN_USE)
    await host.load("b", then=IN_USE)
    await host.settle(LONG_S)
    await host.use(c=WAITING, d=WAITING)
    await host.settle(LONG_S)
    assert host.states == {"a": "leaving", "b": "loaded", "c": "unloaded", "d": "unloaded"}
    await host.complete_stop("a")
    await host.settle(LONG_S)
    assert host.states == {"a": "unloaded", "b": "loaded", "c": "loading", "d": "unloaded"}
    await host.complete_start("c")
    assert host.states == {"a": "unloaded", "b": "leaving", "c": "loaded", "d": "unloaded"}


async def test_each_of_three_in_demand_waits_for_three_loads_at_most(
    tasks: BackgroundTasks,
) -> None:
    host = Host(tasks, limit_bytes=2 * GB)
    for name in "abc":
        host.add(name)
    demand = Demand(host, "abc")
    await demand.run(60.0)
    assert demand.longest_s <= 3 * demand.LOAD_S
    assert min(demand.served.values()) > 100
    assert len(host.processes.started) >= 12, "they take turns"


async def test_a_model_stays_when_the_one_that_waited_for_it_is_wanted_no_more(small: Host) -> None:
    await small.load("a", then=IN_USE)
    small.child("a").calls = 1
    await small.use(b=WAITING)
    await small.settle(LONG_S)
    assert small.states["a"] == "leaving"
    await small.use(b=None)
    assert small.states == {"a": "loaded", "b": "unloaded"}


async def test_a_model_that_cannot_be_loaded_is_tried_again_later_and_harms_none(
    roomy: Host,
) -> None:
    roomy.add("a")
    roomy.add("b")
    await roomy.load("b", then=IN_USE)
    await roomy.use(a=WAITING)
    roomy.processes.starts["a"].set_exception(ModelUnavailable("no weights"))
    await roomy.settle()
    await roomy.complete_stop("a")
    record = roomy.loader.records["a"]
    assert (record.state, record.reason, record.backoff_s) == ("failed", "no weights", 2.0)
    await roomy.settle(1.0)
    assert roomy.processes.started == ["b", "a"]
    await roomy.settle(1.0)
    assert roomy.processes.started == ["b", "a", "a"]
    roomy.processes.starts["a"].set_exception(ModelUnavailable("no weights"))
    await roomy.settle()
    await roomy.complete_stop("a")
    assert roomy.loader.records["a"].backoff_s == 4.0
    await roomy.use(a=None)
    await roomy.settle(4.0)
    assert roomy.loader.records["a"] == LoadRecord("failed", "no weights")
    assert roomy.processes.started == ["b", "a", "a"], "nobody asks for it"
    await roomy.use(a=WAITING)
    await roomy.complete_start("a")
    assert roomy.states == {"a": "loaded", "b": "loaded"}


async def test_a_worker_that_dies_again_and_again_fails_its_model(roomy: Host) -> None:
    roomy.add("a")
    await roomy.load("a", then=IN_USE)
    child = roomy.child("a")
    child.ready, child.crash_loop_reason = False, "died 5 times"
    await roomy.settle()
    await roomy.complete_stop("a")
    assert roomy.loader.records["a"].reason == "died 5 times"


async def test_a_model_that_never_fits_is_refused_with_the_numbers(small: Host) -> None:
    await small.load("a")
    small.add("big", memory=5 * GB)
    await small.use(big=WAITING)
    record = small.loader.records["big"]
    assert record.state == "failed"
    assert "need 5120 MiB" in record.reason
    assert "0 MiB of the 1024 MiB for workers" in record.reason
    assert small.leaving == set(), "no other one had to go"


async def test_a_removed_model_is_not_loaded(roomy: Host) -> None:
    roomy.add("a")
    roomy.loader.forget("a")
    await roomy.use(a=WAITING)
    assert (roomy.processes.started, roomy.states) == ([], {})


async def test_a_model_waits_for_the_memory_of_one_that_is_removed(small: Host) -> None:
    await small.load("a", then=IN_USE)
    small.loader.forget("a")  # its workers drain
    await small.use(a=None, b=WAITING)
    assert small.states == {"b": "unloaded"}
    small.child("a").desired = False
    await small.settle(1.0)
    assert small.states == {"b": "unloaded"}
    small.processes.children.clear()
    await small.settle()
    await small.complete_start("b")
    assert small.states == {"b": "loaded"}


async def test_idle_models_make_room_for_one_that_is_always_loaded(tasks: BackgroundTasks) -> None:
    host = Host(tasks, limit_bytes=3 * GB)
    for name in ("used", "old", "new"):
        host.add(name)
        await host.load(name)
    await host.use(used=IN_USE)
    always = replace(host.processes.specs["old"], name="always-worker", model="always")
    host.processes.children.append(Child(always))
    await host.settle()
    assert host.leaving == {"old"}


async def test_added_models_get_a_share_of_what_all_others_leave(
    small: Host, tasks: BackgroundTasks
) -> None:
    assert small.loader.spare_bytes() == 1, "both need all of it, and take turns"
    assert Host(tasks).loader.spare_bytes() == 0, "no limit is known"
    host = Host(tasks, limit_bytes=5 * GB)
    for name in ("a", "b", "c"):
        host.add(name)
    always = replace(host.processes.specs.pop("c"), name="always-worker", model="always")
    host.loader.forget("c")
    host.processes.children.append(Child(replace(always, settings=Settings())))
    assert host.loader.spare_bytes() == 2 * GB
    with pytest.raises(ConfigError, match=r"no room for 5 workers of d .* need 5120 MiB"):
        host.loader.check_room([replace(always, name=f"d-{n}", model="d") for n in range(5)])
    one_more = replace(host.processes.specs["a"], name="a-worker-1")
    await host.load("a", then=IN_USE)
    host.loader.check_room([replace(one_more, name=f"a-worker-{n}") for n in range(3)])
    with pytest.raises(ConfigError, match="need 4096 MiB, and 2048 MiB of the 5120 MiB"):
        host.loader.check_room([replace(one_more, name=f"a-worker-{n}") for n in range(4)])
