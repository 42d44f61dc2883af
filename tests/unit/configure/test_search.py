"""The search for a deployment, and what it writes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from dynamo.core.errors import ConfigError
from dynamo.core.settings.document import parse_config_document
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.values import BOTH_ROLES
from dynamo.inference.mock.engine import make_mock_engine_info
from dynamo.operations import calculate_optimal_tp, optimize_batch_size
from dynamo.operations.configure import files
from dynamo.operations.configure.catalogue import find_engine, find_gpu, find_model
from dynamo.operations.configure.checking import predict_plan, read_configuration
from dynamo.operations.configure.finalists import replay_plan, step_timing
from dynamo.operations.configure.plans import Plan, Question, Workers, find_layouts
from dynamo.operations.configure.predictor import Predictor
from dynamo.operations.configure.report import explain_failure, pareto_front, why_text
from dynamo.operations.configure.search import Search, SearchResult
from dynamo.operations.configure.yaml_files import write_yaml
from dynamo.operations.replay.fast.replay import FastReplay
from dynamo.operations.replay.replay import ReplayPlan
from dynamo.operations.replay.trace import TraceConversation, TraceRequest
from dynamo.operations.replay.workers import ReplayGroup, ReplayWorkers
from dynamo.services.deployment.model_groups import worker_groups


def ask(**changes: Any) -> Question:
    question = Question(
        shape=find_model("Qwen/Qwen3-32B"),
        gpu=find_gpu("h100_sxm"),
        engines=(find_engine("vllm"),),
        isl=4000,
        osl=1000,
        gpus=8,
        ttft_ms=1000.0,
        tpot_ms=30.0,
    )
    return replace(question, **changes)


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor.shipped(shape=find_model("Qwen/Qwen3-32B"))


@pytest.fixture(scope="module")
def result(predictor: Predictor) -> SearchResult:
    return Search(ask(), predictor).run()


def best(result: SearchResult, kind: str) -> Plan:
    return next(plan for plan in result.plans if plan.kind == kind)


def test_every_plan_keeps_the_promise_within_the_gpus_and_their_memory(
    result: SearchResult,
) -> None:
    assert {plan.kind for plan in result.plans} == {"aggregated", "disaggregated"}
    for plan in result.plans:
        assert plan.ttft_ms <= 1000
        assert plan.tpot_ms <= 30
        assert plan.gpus <= 8
        assert plan.weight_gb + plan.kv_gb < plan.memory_gb
        assert plan.tpot_bar[0] <= plan.tpot_ms < plan.tpot_bar[1]


def test_the_best_plan_comes_first_and_no_layout_twice(result: SearchResult) -> None:
    rates = [plan.tokens_per_gpu * plan.gpus for plan in result.plans]

    assert result.plans[0].rate == max(plan.rate for plan in result.plans)
    assert len(rates) == len({(p.kind, p.layout, p.prefill_layout) for p in result.plans})


def test_fewer_gpus_bear_less(predictor: Predictor) -> None:
    small, large = (Search(ask(gpus=gpus), predictor).run().plans[0].rate for gpus in (4, 16))

    assert small < large


def test_a_rate_gets_the_fewest_gpus_that_bear_it(predictor: Predictor) -> None:
    slow, fast = (Search(ask(gpus=0, rate=rate), predictor).run() for rate in (2.0, 20.0))

    assert slow.plans[0].gpus < fast.plans[0].gpus
    assert all(plan.rate >= 20 * 0.999 for plan in fast.plans)
    assert fast.plans[0].gpus == min(plan.gpus for plan in fast.plans)


def test_cached_prefixes_raise_the_rate(result: SearchResult, predictor: Predictor) -> None:
    cached = Search(ask(prefix=3000), predictor).run()

    assert best(cached, "aggregated").rate > best(result, "aggregated").rate


def test_the_goal_latency_prefers_fast_answers(result: SearchResult, predictor: Predictor) -> None:
    fast = Search(ask(goal="latency"), predictor).run().plans[0]

    def answer_ms(plan: Plan) -> float:
        return plan.ttft_ms + 1000 * plan.tpot_ms

    assert answer_ms(fast) == min(map(answer_ms, [*result.plans, fast]))


def test_nothing_that_fits_names_what_binds_and_the_nearest(predictor: Predictor) -> None:
    question = ask(tpot_ms=0.5)
    result = Search(question, predictor).run()

    text, hint = explain_failure(result, question)

    assert not result.plans
    assert "TPOT binds" in text
    assert "tpot=" in hint


def test_a_rate_that_the_gpus_cannot_bear_is_told(predictor: Predictor) -> None:
    question = ask(rate=1000.0)

    text, _ = explain_failure(Search(question, predictor).run(), question)

    assert "bear at most" in text


def test_weights_that_fit_nowhere_are_refused_with_what_they_need() -> None:
    with pytest.raises(ConfigError, match="812 GB of bf16 weights") as refused:
        find_layouts(ask(shape=find_model("meta-llama/Llama-3.1-405B")))
    assert "11 or more" in refused.value.hint


def test_heads_that_no_degree_divides_leave_one_gpu() -> None:
    odd = replace(find_model("meta-llama/Llama-3.2-1B"), heads=7, kv_heads=7)

    assert {layout.tensor for layout in find_layouts(ask(shape=odd))} == {1}


def test_an_interrupted_search_keeps_its_plans(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "_pairs", interrupt)

    result = Search(ask(), predictor).run()

    assert result.interrupted
    assert {plan.kind for plan in result.plans} == {"aggregated"}


@pytest.mark.parametrize("kind", ["aggregated", "disaggregated"])
def test_written_settings_are_read_back_as_the_same_workers(
    tmp_path: Path, result: SearchResult, predictor: Predictor, kind: str
) -> None:
    plan, question = best(result, kind), ask()
    settings = write_yaml(files.serve_settings(plan, question, "./model"), ["note"])
    graph = write_yaml(files.graph_file(plan, question, "./model", "g"), [])
    compose = write_yaml(files.compose_file(plan, question, "./model"), [])

    assert parse_config_document(settings, "serve.yaml").settings["engine.kind"].raw == "vllm"
    for text in (settings, graph, compose):
        path = tmp_path / "file.yaml"
        path.write_text(text)
        workers = read_configuration(path, question, worker_groups)
        assert (workers.layout.tensor, workers.count) == (plan.layout.tensor, plan.replicas)
        assert workers.prefill_count == plan.prefill_workers
        checked = predict_plan(workers, question, predictor)
        assert checked.tpot_ms == pytest.approx(plan.tpot_ms, rel=0.35)


def test_a_graph_of_tensorrt_llm_tells_the_format_of_its_kv(
    tmp_path: Path, predictor: Predictor
) -> None:
    question = ask(engines=(find_engine("trtllm"),), kv_precision="fp8")
    plan = Search(question, predictor).run().plans[0]
    path = tmp_path / "graph.yaml"
    path.write_text(write_yaml(files.graph_file(plan, question, "./model", "g"), []))

    workers = read_configuration(path, ask(engines=question.engines), worker_groups)

    assert workers.layout.kv_precision == "fp8"


OLD_GRAPH = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
spec:
  services:
    Frontend: {componentType: frontend, extraPodSpec: {mainContainer: {image: x}}}
    Decode:
      componentType: worker
      replicas: 2
      extraPodSpec:
        mainContainer: {command: [python3, -m, dynamo.vllm], args: [--tensor-parallel-size=4]}
    Prefill:
      componentType: worker
      extraPodSpec:
        mainContainer:
          command: [/bin/sh, -c]
          args: ["python3 -m dynamo.vllm --model m --tensor-parallel-size 2 --is-prefill-worker"]
"""


def test_graphs_of_the_older_version_and_lines_for_a_shell_are_read(tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(OLD_GRAPH)

    workers = read_configuration(path, ask(), worker_groups)

    assert (workers.count, workers.layout.tensor) == (2, 4)
    assert workers.prefill_layout is not None
    assert (workers.prefill_count, workers.prefill_layout.tensor) == (1, 2)


def test_the_graph_has_a_component_for_each_kind_of_worker(result: SearchResult) -> None:
    plan = best(result, "disaggregated")
    graph = files.graph_file(plan, ask(), "Qwen/Qwen3-32B", "configured")

    components = {part["name"]: part for part in graph["spec"]["components"]}

    assert graph["apiVersion"] == "nvidia.com/v1beta1"
    assert set(components) == {"Frontend", "prefill", "decode"}
    container = components["prefill"]["podTemplate"]["spec"]["containers"][0]
    assert container["name"] == "main"
    assert container["args"][-2:] == ["--disaggregation-mode", "prefill"]
    assert yaml.safe_load(write_yaml(graph, []))["spec"]["backendFramework"] == "vllm"


def test_the_compose_file_gives_every_worker_gpus_of_its_own(result: SearchResult) -> None:
    plan = best(result, "disaggregated")
    services = files.compose_file(plan, ask(), "Qwen/Qwen3-32B")["services"]

    devices = [
        device
        for service in services.values()
        if "deploy" in service
        for device in service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
    ]

    assert sorted(map(int, devices)) == list(range(plan.gpus))


def test_a_replay_of_the_plan_agrees_with_its_prediction(
    result: SearchResult, predictor: Predictor
) -> None:
    plan = best(result, "aggregated")

    replayed = replay_plan(plan, ask(), predictor)

    assert replayed.good_share is not None
    assert replayed.good_share > 0.8
    assert 0.4 * plan.tpot_ms < replayed.tpot_ms < 1.1 * plan.tpot_ms


def test_flexible_workers_of_a_plan_compute_prompts_for_each_other(
    result: SearchResult, predictor: Predictor
) -> None:
    plan = best(result, "aggregated")

    apart, flexible = (replay_plan(plan, ask(), predictor, flexible=it) for it in (False, True))

    assert (apart.kind, flexible.kind) == ("aggregated", "flexible")
    assert flexible.tpot_ms < 0.95 * apart.tpot_ms  # prompts disturb fewer answers
    assert flexible.ttft_ms > apart.ttft_ms


def test_a_replay_of_the_planned_load_has_the_predicted_time_between_tokens(
    result: SearchResult, predictor: Predictor
) -> None:
    plan, question = best(result, "aggregated"), ask()
    timing = step_timing(plan, question, predictor)
    conversations = [
        TraceConversation(0.0, [TraceRequest(row, question.isl, question.osl)] * 3)
        for row in range(plan.concurrency)
    ]
    info = make_mock_engine_info(
        EngineSettings(num_blocks=40_000, max_num_seqs=512, max_num_batched_tokens=8192),
        context_tokens=20_000,
    )
    group = ReplayGroup(1, replace(info, roles=BOTH_ROLES), timing)
    routing = RouterSettings(mode="round_robin")

    replayed, _ = FastReplay(ReplayPlan("t", ReplayWorkers([group], "lru"), routing, 16)).run(
        conversations
    )

    assert replayed.tpot_ms.mean == pytest.approx(plan.tpot_ms, rel=0.1)


def test_the_picture_s_front_is_beaten_by_no_point(result: SearchResult) -> None:
    front = pareto_front(result.points)

    for plan in result.points:
        assert any(
            other.tokens_per_user >= plan.tokens_per_user
            and other.tokens_per_gpu >= plan.tokens_per_gpu
            for other in front
        )


def test_the_reasons_tell_the_choice_its_memory_and_its_price(result: SearchResult) -> None:
    text = why_text(result, ask(), [], 2.0)

    assert "What binds" in text
    assert "USD a million tokens" in text
    assert "The model has 32.8 billion in bf16" in text


def test_no_answer_is_faster_than_memory_can_be_read(result: SearchResult) -> None:
    for plan in result.plans:
        read_ms = 1e3 * (plan.weight_gb + plan.kv_gb) / find_gpu("h100_sxm").bandwidth
        assert plan.tpot_ms >= 0.9 * read_ms


def test_a_replay_of_an_odd_number_of_workers_has_their_share_of_the_load(
    predictor: Predictor,
) -> None:
    question = ask(gpus=0, ttft_ms=math.inf, tpot_ms=60.0)
    layout = best(Search(ask(gpus=2), predictor).run(), "aggregated").layout
    plans = [
        Search(question, predictor).plans_of([Workers(layout, count, 16)])[0] for count in (2, 3)
    ]

    two, three = (replay_plan(plan, question, predictor) for plan in plans)

    assert three.rate == pytest.approx(1.5 * two.rate)
    assert three.tpot_ms == pytest.approx(two.tpot_ms, rel=0.02)


def test_the_goal_cost_counts_only_gpus_in_use(predictor: Predictor) -> None:
    cheap = Search(ask(goal="cost", gpus=7), predictor).run().plans[0]

    assert cheap.tokens_per_gpu == pytest.approx(1000 * cheap.rate / cheap.gpus)


def test_tensor_parallelism_by_rule_of_thumb() -> None:
    assert calculate_optimal_tp(140, 80, 4) == 3
    assert calculate_optimal_tp(140, 80, 4, per_gpu=True) == 2
    assert calculate_optimal_tp(16, 80, 1) == 1
    assert calculate_optimal_tp(16, 80, 8) == 2
    with pytest.raises(ConfigError, match="needs 9 GPUs"):
        calculate_optimal_tp(400, 80, 4)
    with pytest.raises(ConfigError, match="model_size_gb is nan"):
        calculate_optimal_tp(math.nan, 80, 4)


def test_batch_by_rule_of_thumb() -> None:
    limits = optimize_batch_size({"avg_sequence_length": 1536}, {"gpu_memory_gb": 40})

    assert limits == {
        "max_batch_size": 37,
        "max_num_batched_tokens": 56832,
        "max_num_seqs": 74,
    }
    small = optimize_batch_size({"avg_sequence_length": 4096}, {"gpu_memory_gb": 1})
    assert small["max_batch_size"] == 8
    assert optimize_batch_size({}, {"gpu_memory_gb": 640})["max_batch_size"] == 128
    with pytest.raises(ConfigError, match="gpu_memory_gb is None"):
        optimize_batch_size({}, {})
