"""Plans of service graphs: processes, and service options as settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo.cli.entry import main
from dynamo.cli.serve import split_service_options
from dynamo.core.errors import ConfigError
from dynamo.core.settings import LoadedSettings, SourcedValue, resolve_settings
from dynamo.sdk import depends, dynamo_endpoint, service
from dynamo.sdk.decorators import spec_of
from dynamo.services import (
    DecodeWorker,
    EmbeddingWorker,
    Frontend,
    PrefillWorker,
    Processor,
    Router,
    Worker,
)
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


@service()
class Pairs(Frontend): ...


Pairs.link(DecodeWorker).link(PrefillWorker)  # type: ignore[attr-defined]
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

    values.setdefault("observer.enabled", SourcedValue(False, "test"))

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
    assert plan.settings.engine.kind == "auto"
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


ALWAYS = {"router__disaggregation__mode": "always"}
CONFIGS = Path(__file__).parents[3] / "configs"


def test_always_needs_prefill_workers_in_the_graph() -> None:
    for graph in (Engines, Front):
        with pytest.raises(ConfigError) as caught:
            plan_of(graph, **ALWAYS)
        assert "PrefillWorker" in caught.value.hint
    assert len(plan_of(Pairs, **ALWAYS).with_role("worker")) == 2
    for part in (Front, Engines, DecodeWorker):  # the others may run elsewhere
        plan_of(part, only=True, **ALWAYS)


def test_decode_workers_alone_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    @service()
    class Alone(DecodeWorker): ...

    plan_of(Alone, **ALWAYS)
    assert "until one joins" in caplog.messages[0]


def test_prefill_workers_alone_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    plan_of(PrefillWorker)
    assert "prefill workers alone" in caplog.messages[0]
    caplog.clear()
    assert shape(plan_of(PrefillWorker, only=True)) == [("worker", "PrefillWorker", 1)]
    assert caplog.messages == []


def test_the_groups_of_the_shipped_file_become_processes() -> None:
    for only in (False, True):
        parts = [
            part
            for root in ([PrefillWorker, DecodeWorker] if only else [Pairs])
            for part in plan_of(
                root, file=(CONFIGS / "disagg.yaml").read_text(), only=only
            ).with_role("worker")
        ]
        engines = {part.name: part.settings.engine for part in parts}
        assert {
            name: (engine.role, engine.max_num_seqs, engine.block_size)
            for name, engine in engines.items()
        } == {
            "prefill-worker-1": ("prefill", 32, 16),
            "prefill-worker-2": ("prefill", 32, 16),
            "decode-worker-1": ("decode", 64, 16),
            "decode-worker-2": ("decode", 64, 16),
        }


@pytest.mark.parametrize(
    ("root", "words", "file"),
    [
        (Front, ["--Engines.workers=5"], ""),
        (Pairs, ["--PrefillWorker.workers=2", "--DecodeWorker.workers=3"], ""),
        (Pairs, [], (CONFIGS / "disagg.yaml").read_text()),
        (Engines, ["--Engines.workers=3"], (CONFIGS / "disagg.yaml").read_text()),
    ],
)
def test_each_worker_knows_how_many_share_the_memory(
    root: type[Any], words: list[str], file: str
) -> None:
    plan = plan_of(root, *words, file=file)
    specs = [spec for spec in process_specs(plan, plan.settings) if spec.role == "worker"]

    assert {spec.settings.worker_count for spec in specs} == {len(specs)}


def test_replicas_and_batches_of_roles_reach_the_processes() -> None:
    plan = plan_of(Pairs, file=(CONFIGS / "distributed.yaml").read_text())
    names = [spec.name for spec in process_specs(plan, plan.settings) if spec.role == "worker"]

    assert names == [
        *(f"decode-worker-{number}" for number in range(1, 9)),
        *(f"prefill-worker-{number}" for number in range(1, 5)),
    ]
    batches = {part.name: part.settings.engine.max_num_seqs for part in plan.with_role("worker")}
    assert batches == {"decode-worker": 64, "prefill-worker": 32}


MODELS = """\
engine: {kind: mock}
models:
- {path: /a, name: qwen, workers: 2}
- {path: /b, name: small, prefill_workers: [{}], decode_workers: [{replicas: 2}]}
"""


@service()
class Other(Worker): ...


@service()
class Vectors(EmbeddingWorker): ...


@service()
class Several(Frontend): ...


for linked in (Worker, Other, Vectors):
    Several.link(linked)  # type: ignore[attr-defined]


def test_a_class_of_workers_serves_every_model_but_one_with_a_path_of_its_own() -> None:
    plan = plan_of(Several, "--Other.path=/c", file=MODELS)
    parts = [(part.name, part.replicas, part.settings.model.path) for part in plan.processes[1:]]

    assert parts == [
        ("qwen-Worker", 2, "/a"),
        ("small-prefill-worker", 1, "/b"),
        ("small-decode-worker", 2, "/b"),
        ("Other", 1, "/c"),
        ("Vectors", 1, "minilm"),
    ]
    specs = process_specs(plan, plan.settings)
    assert [spec.model for spec in specs if spec.role == "worker"][:5] == ["qwen"] * 2 + [
        "small"
    ] * 3
    assert not any(spec.settings.models for spec in specs)


MODES = {"agg": 1, "agg_router": 2, "disagg": 2, "disagg_router": 2}
"""Workers by graph."""


@pytest.mark.parametrize("name", MODES)
def test_each_mode_of_the_page_is_a_graph_with_a_configuration(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = CONFIGS.parent
    page = (root / "docs" / "how-to" / "deployment-modes.md").read_text()
    arguments = f"graphs.{name}:Frontend -f configs/{name}.yaml"
    assert f"| `{arguments}` |" in page
    monkeypatch.chdir(root / "examples" / "llm")
    assert main(["serve", *arguments.split(), "--engine.kind", "mock", "--dry-run"]) == 0

    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    counts = {row[0]: int(row[1]) for row in rows if row[1:2] and row[1].isdecimal()}
    assert sum(n for process, n in counts.items() if process.endswith("Worker")) == MODES[name]
    assert ("Router" in counts) == name.endswith("_router")
    assert ("PrefillWorker" in counts) == name.startswith("disagg")


def test_a_graph_that_serves_models_has_an_observer() -> None:
    assert shape(plan_of(Front, observer__enabled=True))[-1] == ("observer", "Observer", 1)
    assert not plan_of(Engines, only=True, observer__enabled=True).with_role("observer")
