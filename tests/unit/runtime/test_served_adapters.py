"""LoRA adapters that the workers of a supervisor load and unload, with tiny real children."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from msgspec.structs import replace
from tests.support.supervisors import control, serving

from dynamo.communication.discovery import open_discovery
from dynamo.core.errors import ConfigError, InvalidRequest, NotFound, WorkerFailed
from dynamo.runtime.deployment import Deployment
from dynamo.runtime.processes.child import ChildProcess, ChildSpec
from dynamo.runtime.processes.parent_pipe import ChildReport
from dynamo.runtime.processes.supervisor import Supervisor
from dynamo.runtime.supervisors import SUPERVISORS_PREFIX, SupervisorRecord

Spec = Callable[..., ChildSpec]
Supervise = Callable[..., Supervisor]

SERVE = 'tell(state="ready"); signal.pause()'
FRONTEND = """
def answer():
    for line in open(0):
        order = json.loads(line).get("order")
        if order and order["adapter"]["name"] == "deadly":
            sys.exit(1)
        if order:
            names[order["adapter"]["name"]] = order["adapter"]["name"]
            failed = order["adapter"].get("path") == "/bad"
            tell(state="ready", answered=order["number"], models=names, refused=REFUSED * failed)

names = {}
tell(state="ready")
answer()
"""


def worker(spec: Spec, name: str, modules: tuple[str, ...] = ()) -> ChildSpec:
    plain = spec(SERVE, f"{name}-worker")
    settings = plain.settings
    engine = replace(settings.engine, lora_modules=modules)
    model = replace(settings.model, names=(name, f"{name}-alias"))
    return replace(plain, model=name, settings=replace(settings, engine=engine, model=model))


@pytest.fixture
def supervisor(spec: Spec, supervise: Supervise) -> Supervisor:
    refused = msgspec.json.encode(
        msgspec.msgpack.encode({"code": InvalidRequest.code, "message": "rank 64"})
    )
    frontend = spec(f"REFUSED = {refused.decode()}{FRONTEND}", "frontend", role="frontend")
    return supervise(frontend, worker(spec, "a", ("declared=/d",)), worker(spec, "b"))


def report(supervisor: Supervisor, number: int, **adapters: str) -> None:
    """Let a worker report the adapters that it has."""
    child: ChildProcess = supervisor.children[number]
    child.report = ChildReport(state="ready", adapters=adapters)
    supervisor._on_child_change(child)


async def until_announced(deployment: Deployment, expected: dict[str, dict[str, str]]) -> None:
    plane = await open_discovery(deployment.discovery_url)
    async with asyncio.timeout(10):
        while True:
            for value in (await plane.get(SUPERVISORS_PREFIX)).values():
                if msgspec.json.decode(value, type=SupervisorRecord).adapters == expected:
                    await plane.close()
                    return
            await asyncio.sleep(0.01)


async def test_what_workers_load_and_unload_is_announced(
    supervisor: Supervisor, deployment: Deployment
) -> None:
    async with serving(supervisor):
        await until_announced(deployment, {"a": {"declared": "/d"}})
        report(supervisor, 1, declared="/d", sql="/sql")
        report(supervisor, 2, code="/code")
        await until_announced(
            deployment, {"a": {"declared": "/d", "sql": "/sql"}, "b": {"code": "/code"}}
        )
        report(supervisor, 1, sql="/other")  # without the declared one
        await until_announced(
            deployment, {"a": {"declared": "", "sql": "/other"}, "b": {"code": "/code"}}
        )
        report(supervisor, 1, sql="/other", declared="/d")
        report(supervisor, 2)
        await until_announced(deployment, {"a": {"declared": "/d", "sql": "/other"}})


async def test_a_restarted_worker_has_unloaded_nothing(
    supervisor: Supervisor, deployment: Deployment
) -> None:
    async with serving(supervisor):
        report(supervisor, 1, declared="/d", sql="/sql")
        child = supervisor.children[1]
        child.pid, pid = 1 << 30, child.pid
        report(supervisor, 1, declared="/d")
        assert supervisor._models.adapters.loaded("a") == {"declared": "/d", "sql": "/sql"}
        child.pid = pid


async def test_a_frontend_sends_the_orders_of_commands(
    supervisor: Supervisor, deployment: Deployment
) -> None:
    async with serving(supervisor):
        add = {"model": "b-alias", "path": "/sql"}
        assert await control(deployment, "add_adapter", "sql", **add) == [
            "sql is served, an adapter of b"
        ]
        report(supervisor, 2, sql="/sql")
        with pytest.raises(ConfigError, match="'sql' is an adapter of b"):
            await control(deployment, "add_adapter", "sql", **add)
        with pytest.raises(ConfigError, match="'sql' is an adapter of b and cannot be an alias"):
            await control(deployment, "alias", "sql", model="a")
        with pytest.raises(ConfigError, match="'a-alias' is an alias of a"):
            await control(deployment, "add_adapter", "a-alias", **add)
        with pytest.raises(NotFound, match="no model 'c'"):
            await control(deployment, "add_adapter", "x", model="c", path="/x")
        with pytest.raises(InvalidRequest, match="rank 64"):
            await control(deployment, "add_adapter", "x", model="b", path="/bad")
        with pytest.raises(WorkerFailed, match="has died"):
            await control(deployment, "add_adapter", "deadly", model="b", path="/x")


async def test_adapters_of_a_removed_model_are_forgotten(
    supervisor: Supervisor, deployment: Deployment
) -> None:
    async with serving(supervisor):
        report(supervisor, 2, sql="/sql")
        await control(deployment, "remove_model", "b")
        await until_announced(deployment, {"a": {"declared": "/d"}})
        with pytest.raises(NotFound, match="no model 'sql'"):
            await control(deployment, "remove_model", "sql")
