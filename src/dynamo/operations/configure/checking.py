"""Configurations that are there: their workers, their prediction, and what they reached."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from dynamo.core.errors import ConfigError, nearest_name_hint
from dynamo.core.settings import Settings, resolve_settings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.operations.configure.catalogue import engines, family_of
from dynamo.operations.configure.files import FP8_KV, HEADROOM
from dynamo.operations.configure.measured import MeasuredRow
from dynamo.operations.configure.plans import (
    MOST_GPUS,
    Layout,
    Plan,
    Question,
    Workers,
    check_layout,
)
from dynamo.operations.configure.predictor import Predictor
from dynamo.operations.configure.search import BATCHES, Search
from dynamo.operations.configure.yaml_files import read_yaml

DEFAULT_SEQS = 256
ANSWERING = ("decode", "worker", "both")


class WorkerGroup(Protocol):
    """Equal workers of settings."""

    @property
    def replicas(self) -> int: ...
    @property
    def settings(self) -> Settings: ...


def read_configuration(
    path: Path, question: Question, groups_of: Callable[[Settings], Sequence[WorkerGroup]]
) -> Workers:
    """Read the workers of settings for `dynamo serve`, by their groups, of a
    DynamoGraphDeployment, or of a compose file. Raises `ConfigError`, also for impossible ones."""
    content = read_yaml(path)
    if content.get("kind") == "DynamoGraphDeployment" or "services" in content:
        return _by_role(path, _read_graph(path, content, question), question)
    settings = resolve_settings(document=(path.read_text(), str(path))).settings
    by_role: dict[str, tuple[Layout, int, int]] = {}
    for group in groups_of(settings):
        engine = group.settings.engine
        seqs = engine.max_num_seqs or DEFAULT_SEQS
        by_role[engine.role] = (_layout(path, engine, question), group.replicas, seqs)
    return _by_role(path, by_role, question)


def _layout(path: Path, engine: EngineSettings, question: Question) -> Layout:
    known = {facts.kind: name for name, facts in engines().items()} | {"trtllm": "trtllm"}
    known |= dict.fromkeys(("auto", "mock"), question.engines[0].name)
    if engine.kind not in known:
        hint = nearest_name_hint(engine.kind, engines())
        raise ConfigError(f"{path}: no times of engine {engine.kind!r}", hint=hint)
    data = max(engine.data_parallel_size, _number(path, engine.args.get("dp_size", 1)))
    return Layout(
        engine=known[engine.kind],
        tensor=max(engine.tensor_parallel_size, data),
        stages=engine.pipeline_parallel_size,
        attention_dp=data > 1 or bool(engine.args.get("enable_attention_dp")),
        split_experts=any(re.search("expert|ep_size", name) for name in engine.args),
        kv_precision="fp8" if engine.kv_cache_dtype == "fp8" else _own_kv(question),
    )


def _by_role(
    path: Path, by_role: Mapping[str, tuple[Layout, int, int]], question: Question
) -> Workers:
    for layout, *_ in by_role.values():
        check_layout(question, layout)
    answering = next((by_role[role] for role in ANSWERING if role in by_role), None)
    if answering is None:
        modules = ", ".join(own.module for own in engines().values())
        raise ConfigError(
            f"{path} has no workers that answer", hint=f"engines with times are {modules}"
        )
    ahead = by_role.get("prefill")
    return Workers(*answering, *(ahead[:2] if ahead else ()))


def _read_graph(
    path: Path, content: Mapping[str, Any], question: Question
) -> Mapping[str, tuple[Layout, int, int]]:
    by_role: dict[str, tuple[Layout, int, int]] = {}
    for kind, replicas, container in _containers(content):
        parts = [container.get(name) or () for name in ("command", "args")]
        lines = [line for part in parts for line in ([part] if isinstance(part, str) else part)]
        words = [word for line in lines for word in _split_words(str(line))]
        module = next((word for word in words if word.startswith("dynamo.")), "")
        engine = next((name for name, own in engines().items() if own.module == module), "")
        if engine:
            ahead = kind == "prefill" or not {"prefill", "--is-prefill-worker"}.isdisjoint(words)
            role = "prefill" if ahead else "worker"
            layout, seqs = _read_words(path, words, engine, question)
            known = by_role[role][1] if role in by_role else 0
            by_role[role] = (layout, known + _number(path, replicas), seqs)
    return by_role


def _containers(content: Mapping[str, Any]) -> Iterator[tuple[str, object, Mapping[str, Any]]]:
    """Yield the kind, number and container of the parts of a graph (v1beta1 has components,
    v1alpha1 services) and of a compose file."""
    spec = _section(content, "spec")
    for part in _sections(spec, "components"):
        pod = _section(_section(part, "podTemplate"), "spec")
        for container in _sections(pod, "containers"):
            yield str(part.get("type")), part.get("replicas", 1), container
    for part in _section(spec, "services").values():
        pod = _section(_mapping(part, "a service"), "extraPodSpec")
        kind = part.get("subComponentType") or part.get("componentType")
        yield str(kind), part.get("replicas", 1), _section(pod, "mainContainer")
    for part in _section(content, "services").values():
        yield "", 1, _mapping(part, "a service")


def _split_words(line: str) -> Sequence[str]:
    """Return the words of a flag with its value, or of a line for a shell."""
    if re.match("--[a-z-]+=", line):
        return line.split("=", 1)
    return line.split() if re.search(r"-m\s+dynamo\.", line) else [line]


def _read_words(
    path: Path, words: Sequence[str], engine: str, question: Question
) -> tuple[Layout, int]:
    flags = engines()[engine].flags

    def value(name: str, default: int) -> int:
        flag = flags.get(name, "")
        return _number(path, [*words, ""][words.index(flag) + 1]) if flag in words else default

    data = value("dp", 1)
    layout = Layout(
        engine=engine,
        tensor=max(value("tp", 1), data),
        stages=value("pp", 1),
        attention_dp=data > 1 or "--enable-attention-dp" in words,
        split_experts=flags.get("ep", "") in words,
        kv_precision="fp8" if FP8_KV in words or "fp8" in words else _own_kv(question),
    )
    return layout, value("seqs", DEFAULT_SEQS)


def _own_kv(question: Question) -> str:
    return question.kv_precision or "bf16"


def _section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return _mapping(content.get(name) or {}, name)


def _mapping(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is no mapping")
    return value


def _sections(content: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    entries = content.get(name) or ()
    if not isinstance(entries, list | tuple) or not all(
        isinstance(each, Mapping) for each in entries
    ):
        raise ConfigError(f"{name} is no list of mappings")
    return entries


def _number(path: Path, value: object) -> int:
    if not str(value).isdecimal() or not 1 <= int(str(value)) <= MOST_GPUS:
        raise ConfigError(f"{path}: {value!r} where a number from 1 to {MOST_GPUS} was expected")
    return int(str(value))


def predict_plan(workers: Workers, question: Question, predictor: Predictor) -> Plan:
    """Return the plan of workers that run as many requests as they may, or as bear the rate."""
    most = max(1, int(workers.seqs / HEADROOM))
    batches = [*(batch for batch in BATCHES if batch < most), most]
    options = [msgspec.structs.replace(workers, seqs=batch) for batch in batches]
    plans = Search(question, predictor).plans_of(options)
    if question.rate:
        chosen = next((plan for plan in plans if plan.rate >= question.rate), plans[-1])
    else:
        good = [plan for plan in plans if plan.misses(question) <= 1]
        chosen = good[-1] if good else plans[0]
    binds = "memory" if chosen.concurrency > chosen.capacity else ""
    return msgspec.structs.replace(chosen, binds=binds)


def measured_row(path: str, question: Question, workers: Workers | None) -> MeasuredRow:
    """Return the row of a result of `dynamo bench`, measured on `workers`; without them on one
    replica of the question's engine on all its GPUs. Raises `ConfigError`."""
    from dynamo.operations.bench.bench_result import read_result

    result = read_result(path)
    if not result.requests or not result.ttft_ms.mean or not result.tpot_ms.mean:
        raise ConfigError(f"{path} has no answered requests with times")
    if workers is None and (len(question.engines) > 1 or not question.gpus):
        raise ConfigError(
            "--measured needs what was measured",
            hint="--check FILE, or --engine and --gpus of one replica",
        )
    layout = workers.layout if workers else None
    count = workers.count if workers else 1
    newest = Predictor.shipped().newest(question.engines[0].name, "", "")
    return MeasuredRow(
        engine=layout.engine if layout else question.engines[0].name,
        version=newest[0],
        day="9999-12-31",
        model=family_of(question.shape),
        gpu=question.gpu.name,
        precision=question.shape.precision,
        gpus=layout.tensor if layout else question.gpus,
        attention_dp=int(layout.attention_dp) if layout else 0,
        split_experts=int(layout.split_experts) if layout else 0,
        isl=max(1, round(result.prompt_tokens / result.requests)),
        osl=max(1, round(result.output_tokens / result.requests)),
        concurrency=max(1.0, result.requests_per_s * result.e2e_ms.mean / 1e3 / count),
        ttft_ms=result.ttft_ms.mean,
        tpot_ms=result.tpot_ms.mean,
    )
