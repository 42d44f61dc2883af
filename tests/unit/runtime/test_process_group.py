"""Scale, drain and restart over the control socket, with tiny real children."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.support.supervisors import control, serving

from dynamo.communication.discovery.disk_reserve import DiskReserve
from dynamo.core.errors import ConfigError, ModelUnavailable, NotFound
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.deployment import Deployment, ProcessRecord
from dynamo.runtime.processes import process_group
from dynamo.runtime.processes.child_spec import ChildSpec, MemoryNeed
from dynamo.runtime.processes.control import ControlRequest, send_control_request
from dynamo.runtime.processes.exit_status import (
    OOM_KILL_TEXT,
    count_oom_kills,
    describe_exit,
    killed_by_oom,
)
from dynamo.runtime.processes.process_names import kind_of_process
from dynamo.runtime.processes.reload import SettingsReloader
from dynamo.runtime.processes.supervisor import Supervisor

Spec = Callable[..., ChildSpec]
Supervise = Callable[..., Supervisor]

SERVE = 'tell(state="ready"); signal.pause()'
STARTS_ONCE = """
import pathlib
marker = pathlib.Path({path!r})
if marker.exists():
    tell(fatal="no room", hint="make some"); sys.exit(1)
marker.touch()
tell(state="ready"); signal.pause()
"""


def names(supervisor: Supervisor) -> Sequence[str]:
    return [child.spec.name for child in supervisor.children]


async def test_scaling_up_and_down(
    spec: Spec, supervise: Supervise, deployment: Deployment
) -> None:
    async with serving(supervise(spec(SERVE, "worker"))) as supervisor:
        progress = await control(deployment, "scale", "worker", 3)
        assert progress == ["worker-1 serves", "worker-2 serves"]
        assert names(supervisor) == ["worker", "worker-1", "worker-2"]
        assert all(child.ready for child in supervisor.children)
        assert await control(deployment, "scale", "worker", 1) == [
            "worker-1 has left",
            "worker-2 has left",
        ]
        assert await control(deployment, "scale", "worker", 0) == ["worker has left"]
        assert await control(deployment, "scale", "worker", 1) == ["worker-1 serves"]


@pytest.mark.parametrize("name", ["worker", "vllmworker"])
async def test_a_kind_may_be_named_by_its_role(
    spec: Spec, supervise: Supervise, deployment: Deployment, name: str
) -> None:
    async with serving(supervise(spec(SERVE, "VllmWorker-1"))) as supervisor:
        await control(deployment, "scale", name, 2)
        assert names(supervisor) == ["VllmWorker-1", "VllmWorker-2"]
        await control(deployment, "scale", name, 0)
        await control(deployment, "scale", name, 1)
        assert names(supervisor) == ["VllmWorker-1"]


async def test_a_role_of_several_kinds_is_not_a_kind(
    spec: Spec, supervise: Supervise, deployment: Deployment
) -> None:
    async with serving(supervise(spec(SERVE, "Fast-1"), spec(SERVE, "Slow-1"))):
        with pytest.raises(NotFound) as caught:
            await control(deployment, "scale", "worker", 2)
        assert "Fast, Slow" in caught.value.hint


async def test_replicas_keep_their_own_devices(
    spec: Spec, supervise: Supervise, deployment: Deployment
) -> None:
    def with_devices(name: str, *device_ids: int) -> ChildSpec:
        engine = EngineSettings(device_ids=device_ids)
        return replace(spec(SERVE, name), settings=Settings(engine=engine))

    specs = [with_devices("worker-1", 0, 1), with_devices("worker-2", 2, 3)]
    async with serving(supervise(*specs)) as supervisor:

        def devices() -> dict[str, tuple[int, ...]]:
            children = supervisor.children
            return {child.spec.name: child.spec.settings.engine.device_ids for child in children}

        await control(deployment, "restart", "worker")
        assert devices() == {"worker-1": (0, 1), "worker-2": (2, 3)}
        with pytest.raises(ConfigError, match="no device is left for worker-3"):
            await control(deployment, "scale", "worker", 3)
        await control(deployment, "drain", "worker-1")
        await control(deployment, "scale", "worker", 2)
        assert devices() == {"worker-2": (2, 3), "worker-1": (0, 1)}


async def test_a_replica_without_cards_of_its_own_is_refused(
    spec: Spec, supervise: Supervise, deployment: Deployment
) -> None:
    first = replace(spec(SERVE, "worker-1"), cards=("0",))
    async with serving(supervise(first, spec(SERVE, "worker-2"))) as supervisor:
        await control(deployment, "scale", "worker", 1)
        with pytest.raises(ConfigError, match="no device is left for worker-2"):
            await control(deployment, "scale", "worker", 2)
        assert names(supervisor) == ["worker-1"]


async def test_a_full_disk_prevents_only_additional_processes(
    spec: Spec, supervise: Supervise, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(supervise(spec(SERVE, "worker-1"), spec(SERVE, "worker-2"))) as supervisor:
        monkeypatch.setattr(DiskReserve, "free_bytes", lambda _: 0)
        with pytest.raises(ModelUnavailable, match=f"the state folder {deployment.folder}") as full:
            await control(deployment, "scale", "worker", 3)
        assert "free space on that disk" in full.value.hint
        assert names(supervisor) == ["worker-1", "worker-2"]
        assert await control(deployment, "restart", "worker-1") == ["worker-1 was replaced"]
        assert await control(deployment, "scale", "worker", 1) == ["worker-1 has left"]


async def test_scaling_down_stops_unready_children_first(
    spec: Spec, supervise: Supervise, deployment: Deployment, tmp_path: Path
) -> None:
    once = STARTS_ONCE.format(path=str(tmp_path / "mark")).replace("tell(fatal", "dict(fatal")
    async with serving(supervise(spec(once, "worker-1"), spec(SERVE, "worker-2"))) as supervisor:
        unready = supervisor.children[0]
        os.kill(unready.pid, signal.SIGKILL)
        while unready.ready:
            await asyncio.sleep(0.01)
        assert await control(deployment, "scale", "worker", 1) == ["worker-1 has left"]
        assert supervisor.children[0].ready


async def test_the_first_supervisor_of_a_name_executes_the_requests(
    spec: Spec, supervise: Supervise, deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(supervise(spec(SERVE, "first"))) as supervisor:
        async with serving(supervise(spec(SERVE, "second"))):
            assert "a deployment of this name runs already" in caplog.text
            assert await control(deployment, "restart", "first") == ["first was replaced"]
        assert await control(deployment, "drain", "first") == ["first has left"]
        assert names(supervisor) == []


async def test_a_deployment_that_ended_leaves_no_files(
    spec: Spec, supervise: Supervise, deployment: Deployment
) -> None:
    async with serving(supervise(spec(SERVE, "worker"))):
        killed = ProcessRecord(
            deployment="test", role="worker", name="w", pid=os.getpid(), start_ticks=1, instance="x"
        )
        deployment.write_record(killed)
    assert not deployment.folder.exists()


async def test_a_drained_child_is_not_restarted(
    spec: Spec, supervise: Supervise, deployment: Deployment
) -> None:
    async with serving(supervise(spec(SERVE, "worker-1"), spec(SERVE, "worker-2"))) as supervisor:
        drained_pid = supervisor.children[0].pid
        assert await control(deployment, "drain", "worker-1") == ["worker-1 has left"]
        assert names(supervisor) == ["worker-2"]
        with pytest.raises(ProcessLookupError):
            os.kill(drained_pid, 0)


async def test_a_rolling_restart_replaces_all_of_a_kind(
    spec: Spec, supervise: Supervise, deployment: Deployment
) -> None:
    async with serving(supervise(spec(SERVE, "worker-1"), spec(SERVE, "worker-2"))) as supervisor:
        before = {child.pid for child in supervisor.children}
        progress = await control(deployment, "restart", "worker")
        assert progress == ["worker-1 was replaced", "worker-2 was replaced"]
        assert sorted(names(supervisor)) == ["worker-1", "worker-2"]
        assert not before & {child.pid for child in supervisor.children}


@pytest.mark.parametrize(
    ("processes", "replaced"),
    [(("frontend", "worker-1"), ["worker-1"]), (("Backend", "Front"), ["Backend", "Front"])],
)
async def test_a_restart_without_a_name_replaces_workers_or_a_graph(
    spec: Spec,
    supervise: Supervise,
    deployment: Deployment,
    processes: Sequence[str],
    replaced: list[str],
) -> None:
    async with serving(supervise(*(spec(SERVE, name) for name in processes))):
        progress = await control(deployment, "restart", "")
        assert progress == [f"{name} was replaced" for name in replaced]


async def test_replacements_have_the_reloaded_settings(
    spec: Spec, supervise: Supervise, deployment: Deployment, tmp_path: Path
) -> None:
    file, out = tmp_path / "file", io.StringIO()
    file.write_text("1")

    def read() -> list[ChildSpec]:
        engine = replace(Settings().engine, num_blocks=int(file.read_text()))
        worker = spec(
            'print(start["settings"]["engine"]["num_blocks"], flush=True)\n' + SERVE, "worker"
        )
        return [replace(worker, settings=replace(Settings(), engine=engine))]

    reload = SettingsReloader(read, [str(file)])
    async with serving(supervise(*read(), reload=reload, out=out)) as supervisor:
        file.write_text("22")
        await control(deployment, "restart", "worker")
        await control(deployment, "scale", "worker", 0)
        await control(deployment, "scale", "worker", 1)
        assert all(child.ready for child in supervisor.children)
    progress = [line.rpartition(" ")[2] for line in out.getvalue().splitlines()]
    assert progress == ["1", "22", "22"]


async def test_a_replacement_that_cannot_start_leaves_the_old_child(
    spec: Spec, supervise: Supervise, deployment: Deployment, tmp_path: Path
) -> None:
    script = STARTS_ONCE.format(path=str(tmp_path / "mark"))
    async with serving(supervise(spec(script, "worker"))) as supervisor:
        (old,) = supervisor.children
        with pytest.raises(ModelUnavailable, match="no room"):
            await control(deployment, "restart", "worker")
        assert supervisor.children == [old]
        assert old.ready


NEVER_SERVES_A_URL = """
if start["settings"]["engine"]["urls"]:
    tell(state="starting"); signal.pause()
tell(state="ready"); signal.pause()
"""


async def test_other_requests_are_executed_while_a_url_starts(
    spec: Spec, supervise: Supervise, deployment: Deployment
) -> None:
    async with serving(supervise(spec(NEVER_SERVES_A_URL, "worker"))) as supervisor:
        adding = asyncio.create_task(control(deployment, "add", "http://dead"))
        while len(supervisor.children) < 2:
            await asyncio.sleep(0.01)
        assert await control(deployment, "restart", "worker") == ["worker was replaced"]
        assert await control(deployment, "remove", "http://dead") == ["worker-1 has left"]
        with pytest.raises(ModelUnavailable, match="worker-1 cannot start: it was stopped"):
            await adding
        assert names(supervisor) == ["worker"]


async def test_a_url_that_does_not_serve_in_time_is_removed(
    spec: Spec, supervise: Supervise, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "URL_START_TIMEOUT_S", 0.1)
    async with serving(supervise(spec(NEVER_SERVES_A_URL, "worker"))) as supervisor:
        with pytest.raises(ModelUnavailable, match="http://dead does not serve the model after"):
            await control(deployment, "add", "http://dead")
        assert names(supervisor) == ["worker"]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (("drain", "nobody"), NotFound),
        (("scale", "nobody", 1), NotFound),
        (("scale", "worker", -1), ConfigError),
        (("scale", "worker", 1_000_000), ConfigError),
    ],
)
async def test_impossible_requests_raise(
    spec: Spec,
    supervise: Supervise,
    deployment: Deployment,
    wrong: tuple[object, ...],
    error: type[Exception],
) -> None:
    async with serving(supervise(spec(SERVE, "worker"))):
        with pytest.raises(error):
            await control(deployment, *wrong)


async def test_workers_that_do_not_fit_into_the_memory_are_refused(
    spec: Spec, deployment: Deployment
) -> None:
    need = MemoryNeed(100 << 20, 50 << 20, "weights")
    worker = replace(spec(SERVE, "a-worker"), model="a", memory=need)
    runtime = replace(Settings().runtime, memory=350 << 20, discovery=deployment.discovery_url)
    supervisor = Supervisor(
        [worker, spec(SERVE, "frontend", role="frontend")],
        deployment,
        replace(Settings(), runtime=runtime),
    )
    async with serving(supervisor):
        assert await control(deployment, "scale", "a", 3) == [
            "a-worker-1 serves",
            "a-worker-2 serves",
        ]
        message = "no room for 2 workers of a .* need 200 MiB, and 350 MiB of the 350 MiB"
        with pytest.raises(ConfigError, match=message):
            await control(deployment, "scale", "a", 5)
        assert len(names(supervisor)) == 4
        assert await control(deployment, "scale", "frontend", 2) == ["frontend-1 serves"]


@pytest.mark.parametrize("request_", [("scale", "rare", 2), ("restart", "rare-worker")])
async def test_processes_of_a_model_that_is_not_loaded_cannot_be_scaled(
    spec: Spec, supervise: Supervise, deployment: Deployment, request_: tuple[object, ...]
) -> None:
    rare = spec(SERVE, "rare-worker")
    model = replace(rare.settings.model, load="on_demand", names=("rare",))
    rare = replace(rare, model="rare", settings=replace(rare.settings, model=model))
    async with serving(supervise(spec(SERVE, "worker"), rare)) as supervisor:
        with pytest.raises(NotFound, match="no rare-worker runs: rare is not loaded"):
            await control(deployment, *request_)
        assert names(supervisor) == ["worker"]


def test_a_request_without_a_supervisor_raises(deployment: Deployment) -> None:
    deployment.create_folder()
    with pytest.raises(NotFound, match="accepts no control requests"):
        list(send_control_request(ControlRequest("drain", "x"), deployment.folder, 1.0))


def test_the_kind_of_a_process_is_its_name_without_a_number() -> None:
    assert [kind_of_process(name) for name in ("worker", "worker-2", "my-worker", "a-b-12")] == [
        "worker",
        "worker",
        "my-worker",
        "a-b",
    ]


async def test_a_crash_loop_is_reported(
    spec: Spec, supervise: Supervise, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = supervise(spec("sys.exit(7)", "worker"))
    (child,) = supervisor.children
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        child._backoff._delay_s = 0.001
        while not child.crash_loop_reason:
            await asyncio.sleep(0.005)
        assert (
            supervisor._unhealthy_reasons()["worker"]
            == "died 5 times before it served, last by exit 7"
        )
        assert "process is in a crash loop: it dies before it serves" in caplog.text
        supervisor.stop()
        await running


def test_an_out_of_memory_kill_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = tmp_path / "vmstat"
    counts.write_text("nr_free_pages 7\noom_kill 3\noom_kill_x 9\n")
    monkeypatch.setattr("dynamo.runtime.processes.exit_status.VMSTAT", counts)
    monkeypatch.setattr("dynamo.runtime.processes.exit_status.CGROUP_ROOT", tmp_path)
    assert count_oom_kills() == 3
    assert killed_by_oom(2, 1 << 50)
    assert not killed_by_oom(3, 1 << 50)
    assert not killed_by_oom(2, 1 << 20)
    assert describe_exit(-9, out_of_memory=True) == OOM_KILL_TEXT
    assert describe_exit(-15, out_of_memory=True) == "SIGTERM"
    assert describe_exit(-9) == "SIGKILL"
