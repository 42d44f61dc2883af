"""Plans of service graphs: processes, and service options as settings."""

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


def plan_of(
    root: type[Any], *words: str, file: str = "", only: bool = False, **flags: Any
) -> DeploymentPlan:
    values = {
        key.replace("__", "."): SourcedValue(value, f"flag --{key}") for key, value in flags.items()
    }
    document = (file, "graph.yaml") if file else None

    def load(extra: Mapping[str, SourcedValue]) -> LoadedSettings:
        return resolve_settings({**values, **extra}, {}, document)

    rest, options = split_service_options(words)
    assert rest == []
    return plan_deployment(root, load({}), load, options, only=only)


def shape(plan: DeploymentPlan) -> list[tuple[str, str, int]]:
    return [(part.role, part.name, part.replicas) for part in plan.processes]


def test_frontend_processor_and_router_share_a_process() -> None:
    plan = plan_of(Front, "--Route.replicas=0")

    assert shape(plan) == [
        ("frontend", "Front", 1),
        ("service", "Helper", 3),
        ("worker", "Engines", 2),
    ]
    assert [service.__name__ for service in plan.processes[0].services] == [
        "Front",
        "Processor",
        "Route",
    ]
    assert plan.settings.runtime.namespace == "shop"


def test_a_router_subclass_runs_in_its_own_processes() -> None:
    plan = plan_of(Front, "--Route.workers=2")

    assert shape(plan)[:2] == [("frontend", "Front", 1), ("router", "Route", 2)]
    assert [service.__name__ for service in plan.processes[0].services] == ["Front", "Processor"]
    assert all(part.settings.router.replicas == 2 for part in plan.processes)
    assert all(part.settings.router.mode == "kv" for part in plan.processes)
    assert plan_of(Front, "--Route.mode=random").settings.router.mode == "random"
    assert plan_of(Front, only=True).settings.router.replicas == 1
    assert shape(plan_of(Route, only=True)) == [("router", "Route", 1)]
    assert shape(plan_of(Engines, router__replicas=1)) == [
        ("frontend", "Frontend", 1),
        ("router", "Router", 1),
        ("worker", "Engines", 2),
    ]


def test_a_worker_as_the_root_serves_http() -> None:
    assert shape(plan_of(Engines)) == [("frontend", "Frontend", 1), ("worker", "Engines", 2)]
    assert shape(plan_of(Engines, only=True)) == [("worker", "Engines", 2)]
    assert not plan_of(Engines, only=True).serves_http


def test_only_one_service() -> None:
    assert shape(plan_of(Front, only=True)) == [("frontend", "Front", 1)]
    assert shape(plan_of(Helper, only=True)) == [("service", "Helper", 3)]
    assert shape(plan_of(Processor, only=True)) == [("processor", "Processor", 1)]
    assert not plan_of(Processor, only=True).serves_http


def test_a_graph_without_a_model_is_named_after_its_root() -> None:
    alone = plan_of(Alone)

    assert (shape(alone), alone.serves_models, alone.serves_http) == (
        [("service", "Alone", 1)],
        False,
        False,
    )
    assert with_deployment_name(alone).runtime.deployment == "Alone"
    assert with_deployment_name(plan_of(Front)).runtime.deployment == ""
    assert (
        with_deployment_name(plan_of(Alone, runtime__deployment="mine")).runtime.deployment
        == "mine"
    )


def test_options_of_ready_made_services_are_settings() -> None:
    plan = plan_of(
        Front,
        *("--Front.http_port=8111", "--Route.mode", "random", "--Engines.workers=5"),
        *("--Engines.kind=mock", "--Engines.model.path=/m", "--Engines.ServiceArgs.resources=x"),
    )
    engines = plan.processes[-1]

    assert plan.settings.server.http_port == 8111
    assert plan.settings.router.mode == "random"
    assert plan.settings.engine.kind == "native"
    assert (engines.replicas, engines.settings.engine.kind) == (5, "mock")
    assert engines.settings.model.path == "/m"
    assert engines.settings.server.http_port == 8111


def test_a_flag_overrides_a_section_and_a_section_the_rest_of_the_file() -> None:
    file = "engine: {kind: echo, workers: 7}\nEngines: {kind: mock, ServiceArgs: {workers: 4}}\n"

    assert plan_of(Front, file=file).processes[-1].replicas == 4
    assert plan_of(Front, file=file).processes[-1].settings.engine.kind == "mock"
    assert (
        plan_of(Front, file=file, engine__kind="native").processes[-1].settings.engine.kind
        == "native"
    )
    assert plan_of(Front, "--Engines.workers=1", file=file).processes[-1].replicas == 1


def test_a_user_service_gets_its_section() -> None:
    file = "Helper:\n  words: [a, b]\n  deep: {x: 1, y: 2}\n  ServiceArgs: {workers: 2}\n"
    part = plan_of(Front, "--Helper.deep.x=9", '--Helper.more=["c"]', file=file).processes[2]

    assert part.replicas == 2
    assert part.section["deep"] == {"x": "9", "y": 2}
    assert (part.section["words"], part.section["more"]) == (["a", "b"], ["c"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--Helpr.x=1"], "did you mean 'Helper'"),
        (["--Engines.kid=mock"], "did you mean 'kind'"),
        (["--Helper.workers=0"], "at least 1"),
        (["--Helper.workers"], "has no value"),
    ],
)
def test_invalid_options_are_reported(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(Front, *words)
    assert message in f"{caught.value.message} {caught.value.hint}"


def test_a_subclass_of_a_ready_made_service_may_not_add_methods() -> None:
    @service()
    class Busy(Worker):
        @dynamo_endpoint()
        async def more(self) -> None: ...

    with pytest.raises(ConfigError, match="endpoints, hooks or dependencies of its own"):
        plan_of(Busy)


def test_callers_stop_first_and_share_settings() -> None:
    plan = plan_of(Front, "--Helper.key=value", router__replicas=0)
    specs = process_specs(plan, plan.settings)

    assert [spec.name for spec in specs] == [
        *("Front", "Helper-1", "Helper-2", "Helper-3", "Engines-1", "Engines-2")
    ]
    assert [spec.needs_preparation for spec in specs] == [False] * 4 + [True] * 2
    assert specs[1].task["target"] == f"{__name__}:Helper"
    assert specs[1].task["section"] == {"key": "value"}
    assert [spec.stop_order for spec in specs] == [0, 1, 1, 1, 2, 2]


def test_a_renamed_processor_keeps_the_component_of_the_ready_made_one() -> None:
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
    assert shape(plan_of(Asks))[0] == ("frontend", "Frontend", 1)
    assert plan_of(Asks).processes[0].services == (Frontend, Words)
    with pytest.raises(ConfigError, match="Loud is a ready-made service"):
        plan_of(Loud)
