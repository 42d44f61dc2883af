"""Graphs as processes, and options as settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from dynamo.cli.serve import split_service_options
from dynamo.core.errors import ConfigError
from dynamo.core.settings import LoadedSettings, SourcedValue, resolve_settings
from dynamo.sdk import depends, dynamo_endpoint, service
from dynamo.sdk.decorators import spec_of
from dynamo.services import Frontend, Processor, Router, Worker
from dynamo.services.deployment.plan import (
    DeploymentPlan,
    plan_deployment,
    process_specs,
    with_deployment_name,
)


@service()
class Front(Frontend): ...


@service()
class Route(Router): ...


@service(dynamo={"namespace": "shop"}, workers=2)
class Engines(Worker): ...


@service(workers=3)
class Helper:
    processor = depends(Processor)

    @dynamo_endpoint()
    async def help(self, request: Any) -> Any: ...


@service()
class Alone:
    @dynamo_endpoint()
    async def do(self, request: Any) -> Any: ...


Front.link(Helper)  # type: ignore[attr-defined]
Front.link(Route).link(Engines)  # type: ignore[attr-defined]


def made(
    root: type[Any], *words: str, file: str = "", only: bool = False, **flags: Any
) -> DeploymentPlan:
    given = {
        key.replace("__", "."): SourcedValue(value, f"flag --{key}") for key, value in flags.items()
    }
    document = (file, "graph.yaml") if file else None

    def again(extra: Mapping[str, SourcedValue]) -> LoadedSettings:
        return resolve_settings({**given, **extra}, {}, document)

    rest, options = split_service_options(words)
    assert rest == []
    return plan_deployment(root, again({}), again, options, only=only)


def shape(one: DeploymentPlan) -> list[tuple[str, str, int]]:
    return [(part.role, part.name, part.replicas) for part in one.processes]


def test_frontend_processor_and_router_share_a_process() -> None:
    whole = made(Front, "--Route.replicas=0")

    assert shape(whole) == [
        ("frontend", "Front", 1),
        ("service", "Helper", 3),
        ("worker", "Engines", 2),
    ]
    assert [one.__name__ for one in whole.processes[0].services] == ["Front", "Processor", "Route"]
    assert whole.settings.runtime.namespace == "shop"


def test_a_router_of_ones_own_has_processes_of_its_own() -> None:
    whole = made(Front, "--Route.workers=2")

    assert shape(whole)[:2] == [("frontend", "Front", 1), ("router", "Route", 2)]
    assert [one.__name__ for one in whole.processes[0].services] == ["Front", "Processor"]
    assert all(part.settings.router.replicas == 2 for part in whole.processes)
    assert all(part.settings.router.mode == "kv" for part in whole.processes)
    assert made(Front, "--Route.mode=random").settings.router.mode == "random"
    assert made(Front, only=True).settings.router.replicas == 1
    assert shape(made(Route, only=True)) == [("router", "Route", 1)]
    assert shape(made(Engines, router__replicas=1)) == [
        ("frontend", "Frontend", 1),
        ("router", "Router", 1),
        ("worker", "Engines", 2),
    ]


def test_a_worker_as_the_root_serves_http() -> None:
    assert shape(made(Engines)) == [("frontend", "Frontend", 1), ("worker", "Engines", 2)]
    assert shape(made(Engines, only=True)) == [("worker", "Engines", 2)]
    assert not made(Engines, only=True).serves_http


def test_one_part_alone() -> None:
    assert shape(made(Front, only=True)) == [("frontend", "Front", 1)]
    assert shape(made(Helper, only=True)) == [("service", "Helper", 3)]
    assert shape(made(Processor, only=True)) == [("processor", "Processor", 1)]
    assert not made(Processor, only=True).serves_http


def test_a_graph_without_a_model_is_called_after_its_root() -> None:
    alone = made(Alone)

    assert (shape(alone), alone.serves_models, alone.serves_http) == (
        [("service", "Alone", 1)],
        False,
        False,
    )
    assert with_deployment_name(alone).runtime.deployment == "Alone"
    assert with_deployment_name(made(Front)).runtime.deployment == ""
    assert (
        with_deployment_name(made(Alone, runtime__deployment="mine")).runtime.deployment == "mine"
    )


def test_options_of_ready_made_services_are_settings() -> None:
    whole = made(
        Front,
        *("--Front.http_port=8111", "--Route.mode", "random", "--Engines.workers=5"),
        *("--Engines.kind=mock", "--Engines.model.path=/m", "--Engines.ServiceArgs.resources=x"),
    )
    engines = whole.processes[-1]

    assert whole.settings.server.http_port == 8111
    assert whole.settings.router.mode == "random"
    assert whole.settings.engine.kind == "native"
    assert (engines.replicas, engines.settings.engine.kind) == (5, "mock")
    assert engines.settings.model.path == "/m"
    assert engines.settings.server.http_port == 8111


def test_a_flag_beats_a_section_and_a_section_the_rest_of_the_file() -> None:
    file = "engine: {kind: echo, workers: 7}\nEngines: {kind: mock, ServiceArgs: {workers: 4}}\n"

    assert made(Front, file=file).processes[-1].replicas == 4
    assert made(Front, file=file).processes[-1].settings.engine.kind == "mock"
    assert (
        made(Front, file=file, engine__kind="native").processes[-1].settings.engine.kind == "native"
    )
    assert made(Front, "--Engines.workers=1", file=file).processes[-1].replicas == 1


def test_a_users_service_gets_its_section() -> None:
    file = "Helper:\n  words: [a, b]\n  deep: {x: 1, y: 2}\n  ServiceArgs: {workers: 2}\n"
    part = made(Front, "--Helper.deep.x=9", '--Helper.more=["c"]', file=file).processes[2]

    assert part.replicas == 2
    assert part.section["deep"] == {"x": "9", "y": 2}
    assert (part.section["words"], part.section["more"]) == (["a", "b"], ["c"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--Helpr.x=1"], "did you mean 'Helper'"),
        (["--Engines.kid=mock"], "did you mean 'kind'"),
        (["--Helper.workers=0"], "at least 1"),
        (["--Helper.workers"], "has no value"),
    ],
)
def test_wrong_options_are_told(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(Front, *words)
    assert told in f"{caught.value.message} {caught.value.hint}"


def test_a_ready_made_service_takes_no_methods_of_ones_own() -> None:
    @service()
    class Busy(Worker):
        @dynamo_endpoint()
        async def more(self) -> None: ...

    with pytest.raises(ConfigError, match="endpoints, hooks or dependencies of its own"):
        made(Busy)


def test_specs_are_callers_first_with_the_shared_settings() -> None:
    whole = made(Front, "--Helper.key=value", router__replicas=0)
    specs = process_specs(whole, whole.settings)

    assert [one.name for one in specs] == [
        *("Front", "Helper-1", "Helper-2", "Helper-3", "Engines-1", "Engines-2")
    ]
    assert [one.needs_preparation for one in specs] == [False] * 4 + [True] * 2
    assert specs[1].task["target"] == f"{__name__}:Helper"
    assert specs[1].task["section"] == {"key": "value"}
    assert [one.stop_order for one in specs] == [0, 1, 1, 1, 2, 2]


def test_a_processor_of_another_name_is_called_as_the_ready_made_one() -> None:
    @service()
    class Words(Processor): ...

    @service()
    class Asks:
        words = depends(Words)

    @service()
    class Loud(Processor):
        @dynamo_endpoint("chat/answer")
        async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
            return {}

    assert spec_of(Words).component == "Processor"
    assert shape(made(Asks))[0] == ("frontend", "Frontend", 1)
    assert made(Asks).processes[0].services == (Frontend, Words)
    with pytest.raises(ConfigError, match="Loud is a ready-made service"):
        made(Loud)
