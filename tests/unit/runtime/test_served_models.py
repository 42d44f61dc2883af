"""Models that come and go in a supervisor, with tiny real children."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.support.supervisors import control, serving

from dynamo.communication.discovery import open_discovery
from dynamo.core.errors import ConfigError, DynamoError, ModelUnavailable, NotFound
from dynamo.runtime.deployment import Deployment
from dynamo.runtime.processes import served_models
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.reload import SettingsReloader
from dynamo.runtime.processes.served_models import ModelSources
from dynamo.runtime.processes.supervisor import Supervisor
from dynamo.runtime.supervisors import SUPERVISORS_PREFIX, SupervisorRecord, removals_prefix

Spec = Callable[..., ChildSpec]
Supervise = Callable[..., Supervisor]

SERVE = 'tell(state="ready"); signal.pause()'
STAND_BY = 'tell(state="standby"); signal.pause()'
FAIL = 'tell(fatal="no weights"); sys.exit(1)'
NAMESPACE = "dynamo"


class Sources:
    """Makes a worker that runs the script of an entry, and notes what is saved."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self.saved: list[object] = []
        self.fault: ConfigError | None = None

    async def make_specs(
        self, entry: Mapping[str, Any], workers: int, spare: int
    ) -> Sequence[ChildSpec]:
        assert workers == 2
        added = [model(self._spec, entry["name"], entry["script"])]
        if entry.get("standby"):
            standby = model(self._spec, entry["name"], STAND_BY)
            added.append(replace(standby, name=f"{added[0].name}-standby-1", standby=True))
        return added

    async def save(self, entry: Mapping[str, Any] | None, name: str) -> str:
        if self.fault is not None:
            raise self.fault
        self.saved.append(entry or name)
        return "models.yaml"


def model(spec: Spec, name: str, script: str = SERVE, *aliases: str) -> ChildSpec:
    worker = spec(script, f"{name}-worker")
    section = replace(worker.settings.model, names=(name, *aliases))
    return replace(worker, model=name, settings=replace(worker.settings, model=section))


@pytest.fixture
def sources(spec: Spec) -> Sources:
    return Sources(spec)


@pytest.fixture
def supervisor(spec: Spec, supervise: Supervise, sources: Sources) -> Supervisor:
    specs = model(spec, "a", SERVE, "chat"), model(spec, "b")
    return supervise(*specs, models=ModelSources(sources.make_specs, sources.save))


def test_a_name_that_is_given_twice_is_no_alias(spec: Spec, supervise: Supervise) -> None:
    supervisor = supervise(model(spec, "a", SERVE, "a", "chat", "chat"))
    assert supervisor._models.aliases == {"a": ("chat",)}


async def until_listed(deployment: Deployment, expected: dict[str, list[str]]) -> None:
    """Wait until the record of the supervisor lists these models with their aliases."""
    plane = await open_discovery(deployment.discovery_url)
    async with asyncio.timeout(10):
        while True:
            for value in (await plane.get(SUPERVISORS_PREFIX)).values():
                record = msgspec.json.decode(value, type=SupervisorRecord)
                listed = {name: list(aliases) for name, aliases in record.models.items()}
                if (listed, list(listed), record.namespace) == (
                    expected,
                    list(expected),
                    NAMESPACE,
                ):
                    await plane.close()
                    return
            await asyncio.sleep(0.01)


async def test_models_are_listed_added_renamed_and_removed(
    supervisor: Supervisor, deployment: Deployment, sources: Sources
) -> None:
    async with serving(supervisor):
        await until_listed(deployment, {"a": ["chat"], "b": []})
        entry = {"name": "c", "script": SERVE}
        assert await control(deployment, "add_model", entry=entry, save=True) == [
            "c-worker serves",
            "c is served",
            "models.yaml has the model",
        ]
        assert await control(deployment, "alias", "chat", model="c", save=True) == [
            "chat means c now",
            "models.yaml has the alias",
        ]
        await until_listed(deployment, {"a": [], "b": [], "c": ["chat"]})
        assert await control(deployment, "remove_model", "chat", save=True) == [
            "chat was an alias of c, which is served on",
            "models.yaml lacks the alias",
        ]
        assert await control(deployment, "remove_model", "c", save=True) == [
            "c-worker has left",
            "c is removed",
            "models.yaml lacks the model",
        ]
        assert sources.saved == [entry, {"alias": "chat"}, {"alias": "chat"}, "c"]
        await until_listed(deployment, {"a": [], "b": []})
        assert (await control(deployment, "remove_model", "a"))[-1] == "the default model is b now"
        with pytest.raises(ConfigError, match="only model"):
            await control(deployment, "remove_model", "b")


async def test_an_added_model_serves_while_its_standby_process_waits(
    supervisor: Supervisor, deployment: Deployment
) -> None:
    async with serving(supervisor):
        entry = {"name": "c", "script": SERVE, "standby": True}
        added = await control(deployment, "add_model", entry=entry, save=False)
        assert added == ["c-worker serves", "c is served"]
        names = {child.spec.name for child in supervisor.children}
        assert names >= {"c-worker", "c-worker-standby-1"}
        left = await control(deployment, "remove_model", "c")
        assert left[-1] == "c is removed"
        assert not any(child.spec.model == "c" for child in supervisor.children)


async def test_a_model_whose_workers_sleep_says_so(
    supervisor: Supervisor, deployment: Deployment
) -> None:
    async with serving(supervisor):
        script = 'tell(state="ready"); time.sleep(0.3); tell(state="sleeping"); signal.pause()'
        await control(deployment, "add_model", entry={"name": "c", "script": script}, save=False)
        async with asyncio.timeout(10):
            while '"c","aliases":[],"state":"sleeping"' not in "".join(
                await control(deployment, "models")
            ):
                await asyncio.sleep(0.01)


async def test_a_change_that_is_not_saved_says_how_long_it_holds(
    supervisor: Supervisor, deployment: Deployment, sources: Sources
) -> None:
    sources.fault = ConfigError("models.yaml is not changed: No space left on device")
    async with serving(supervisor):
        entry = {"name": "c", "script": SERVE}
        with pytest.raises(ConfigError, match="No space left") as added:
            await control(deployment, "add_model", entry=entry, save=True)
        assert added.value.hint == "c is served until the deployment ends"
        with pytest.raises(ConfigError, match="No space left") as removed:
            await control(deployment, "remove_model", "c", save=True)
        assert removed.value.hint == "c is removed until the deployment starts again"
        await until_listed(deployment, {"a": ["chat"], "b": []})


async def test_a_reload_compares_workers_with_the_settings_of_their_own_model(
    spec: Spec, supervise: Supervise, deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    specs = [model(spec, "a"), model(spec, "b"), spec(SERVE, "frontend", role="frontend")]
    reload = SettingsReloader(lambda: specs)
    async with serving(supervise(*specs, reload=reload)):
        reload.request_reload()
        await control(deployment, "restart", "frontend")
        assert not caplog.records

        several = replace(specs[2].settings.engine, workers=3)
        more = replace(specs[2].settings, engine=several)
        specs[2:] = [replace(specs[2], settings=more), model(spec, "c")]
        reload.request_reload()
        await control(deployment, "restart", "frontend")
    assert [record.message for record in caplog.records] == ["a model of the file is not served"]


async def test_a_model_that_cannot_start_is_not_added(
    supervisor: Supervisor, deployment: Deployment
) -> None:
    async with serving(supervisor):
        with pytest.raises(ModelUnavailable, match="c-worker cannot start: no weights"):
            await control(deployment, "add_model", entry={"name": "c", "script": FAIL})
        await until_listed(deployment, {"a": ["chat"], "b": []})
        assert [child.spec.model for child in supervisor.children] == ["a", "b"]


async def test_workers_of_a_removed_model_stay_while_a_frontend_has_requests(
    supervisor: Supervisor, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_models, "NOTICE_S", 0.05)
    plane = await open_discovery(deployment.discovery_url)
    key = removals_prefix(NAMESPACE, "b") + "frontend-1"
    async with serving(supervisor):
        await plane.put(key, b"")
        removal = asyncio.create_task(control(deployment, "remove_model", "b"))
        await until_listed(deployment, {"a": ["chat"]})
        assert not removal.done()
        assert [child.spec.model for child in supervisor.children if child.ready] == ["a", "b"]
        await plane.delete(key)
        assert await removal == ["b-worker has left", "b is removed"]
    await plane.close()


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"do": "alias", "name": "a", "model": "b"}, ConfigError, "the name of a model"),
        ({"do": "alias", "name": "x", "model": "chat"}, NotFound, "no model 'chat'"),
        ({"do": "remove_model", "name": "x"}, NotFound, "no model 'x'"),
        (
            {"do": "add_model", "name": "", "entry": {"name": "chat", "script": SERVE}},
            ConfigError,
            "'chat' is an alias of a",
        ),
        (
            {"do": "add_model", "name": "", "entry": {"name": "b", "script": SERVE}},
            ConfigError,
            "'b' is a model",
        ),
    ],
)
async def test_wrong_names_are_refused(
    supervisor: Supervisor,
    deployment: Deployment,
    fields: dict[str, Any],
    error: type[DynamoError],
    text: str,
) -> None:
    async with serving(supervisor):
        with pytest.raises(error, match=text):
            await control(deployment, **fields)


async def test_a_model_that_cannot_start_keeps_no_other_from_being_served(
    spec: Spec, supervise: Supervise, deployment: Deployment
) -> None:
    async with serving(supervise(model(spec, "a", FAIL), model(spec, "b"))) as supervisor:
        assert supervisor.failure is None
        (answer,) = await control(deployment, "models")
        states = {row["name"]: (row["state"], row["reason"]) for row in msgspec.json.decode(answer)}
        assert states == {"a": ("failed", "cannot start: no weights"), "b": ("loaded", "")}


async def test_a_deployment_without_a_model_that_can_start_ends(
    spec: Spec, supervise: Supervise
) -> None:
    supervisor = supervise(model(spec, "a", FAIL), model(spec, "b", FAIL))
    assert await supervisor.run() == 1
    assert supervisor.failure is not None
