"""The figures of a deployment for its planner: what frontends count, and what workers report."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import median

import msgspec

from dynamo.communication.events import Event
from dynamo.communication.http.scrape import scrape
from dynamo.core.clock import Clock
from dynamo.core.errors import DECODE_ERRORS, PlaneUnavailable
from dynamo.core.tasks import run_all
from dynamo.core.timing.model import Timing
from dynamo.core.values import EngineInfo, Load
from dynamo.operations.planner.policies.policy import DEFAULT_START_S
from dynamo.operations.planner.values import Demand, EngineLimits
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.scheduling.workers.load_view import LoadView
from dynamo.scheduling.workers.worker import engine_info
from dynamo.services.model_pipeline import WORKER_COMPONENT
from dynamo.services.planning.backtests import WorkerFacts
from dynamo.services.scrape_targets import ScrapeTarget, ScrapeTargets

REFUSED = {"400", "401", "403", "404", "405", "413", "415", "422"}
"""Statuses of requests that no number of workers would have answered."""
FIGURES = {
    "dynamo_frontend_requests_total": "ended",
    "dynamo_frontend_input_tokens_total": "prompt_tokens",
    "dynamo_frontend_cached_tokens_total": "cached_tokens",
    "dynamo_frontend_output_tokens_total": "output_tokens",
    "dynamo_frontend_input_sequence_tokens_count": "answered",
    "dynamo_frontend_inflight_requests": "in_flight",
    "dynamo_frontend_queued_requests": "waiting",
    "dynamo_admission_waiting_requests": "waiting",
}
STATES = {"in_flight", "waiting"}
"""Figures of now; the others count since the start of a process."""
_SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class DeploymentFigures:
    """Measures the demand of each model. Call `open` first."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self._runtime = runtime
        self._targets = ScrapeTargets(runtime)
        self._loads = _UnreadLoads(runtime.clock)
        self._workers: Client
        self._before: dict[str, Counter[tuple[str, str]]] = {}
        """The counts of each frontend at the last call, by model and figure."""
        self._before_s = 0.0
        self._timings: dict[str, Timing] = {}
        self._limits: dict[str, EngineLimits] = {}
        self._prompts: dict[str, float] = {}
        """The last mean of prompt tokens to compute, which requests in flight are taken to have."""

    async def open(self) -> None:
        """Follow the workers and their load."""
        namespace = self._runtime.namespace()
        component = f"{namespace.name}.{WORKER_COMPONENT}"
        await self._loads.subscribe(self._runtime.events, component)
        workers = namespace.component(WORKER_COMPONENT)
        self._workers = await workers.endpoint("generate").client()

    def worker_facts(self, start_s: float) -> WorkerFacts | None:
        """Return what is known of the workers of the only model, or None."""
        for model, timing in self._timings.items() if len(self._timings) == 1 else ():
            limits = self._limits.get(model, EngineLimits())
            return WorkerFacts(timing, limits, start_s or DEFAULT_START_S)
        return None

    async def measure(self) -> Mapping[str, Demand]:
        """Return the demand of each model since the last call. Where there is one model only, ""
        names it, too. Raises `PlaneUnavailable` if a frontend does not tell its figures."""
        targets = [
            target
            for target in await self._targets.list_targets()
            if target.labels["role"] == "frontend"
        ]
        if not targets:
            raise PlaneUnavailable("no frontend is in discovery: there are no figures")
        texts = await run_all(*(_scrape(target) for target in targets))
        now, first = self._runtime.clock.now(), not self._before
        counted = {
            target.targets[0]: count_figures(text)
            for target, text in zip(targets, texts, strict=True)
        }
        changes = sum_changes(counted, self._before)
        seconds, self._before, self._before_s = now - self._before_s, counted, now
        if first:
            raise PlaneUnavailable("there are figures from the next decision on")
        return self._demands(changes, seconds)

    def _demands(self, changes: Counter[tuple[str, str]], seconds: float) -> Mapping[str, Demand]:
        workers = defaultdict[str, list[Instance]](list)
        for instance in self._workers.instances.values():
            workers[str(instance.capabilities.get("model", ""))].append(instance)
        for model, instances in workers.items():
            self._learn(model, instances)
        models = list(self._limits) or [""]
        if len(models) == 1:
            whole = Counter[tuple[str, str]]()
            for (_, name), value in changes.items():
                whole[models[0], name] += value
            changes = whole
        ended = {model: changes[model, "ended"] for model in models}
        demands = {}
        for model in models:
            share = ended[model] / max(1, sum(ended.values())) if len(models) > 1 else 1.0
            whose = model if len(models) == 1 else ""  # states are not told by model
            states = {name: share * changes[whose, name] for name in (*STATES, "more_in_flight")}
            loads = [self._loads.read(each.id) or Load() for each in workers[model]]
            demands[model] = self._demand(model, changes, states, loads, seconds)
        return {**demands, "": demands[models[0]]} if len(models) == 1 else demands

    def _demand(
        self,
        model: str,
        changes: Mapping[tuple[str, str], float],
        states: Mapping[str, float],
        loads: Sequence[Load],
        seconds: float,
    ) -> Demand:
        answered = changes[model, "answered"]
        if answered:
            computed = changes[model, "prompt_tokens"] - changes[model, "cached_tokens"]
            self._prompts[model] = max(0.0, computed / answered)
        requests = max(0, round(changes[model, "ended"] + states["more_in_flight"]))
        return Demand(
            seconds,
            requests,
            requests * self._prompts.get(model, 0.0),
            round(answered),
            changes[model, "output_tokens"],
            float(sum(load.prefill_tokens for load in loads)),
            sum(load.running for load in loads),
            round(states["in_flight"] if not loads else states["waiting"]),
            self._timings.get(model),
            self._limits.get(model, EngineLimits()),
        )

    def _learn(self, model: str, instances: Sequence[Instance]) -> None:
        """Note what the workers of a model are, for the time when there is none."""
        infos = [info for each in instances if (info := engine_info(each)) is not None]
        if infos:
            self._limits[model] = EngineLimits(
                infos[0].max_num_seqs,
                infos[0].num_blocks * infos[0].block_tokens,
                infos[0].max_num_batched_tokens,
            )
        reports = [(self._loads.read(each.id), engine_info(each)) for each in instances]
        timing = usual_timing([(load, info) for load, info in reports if load is not None])
        if timing is not None:
            self._timings[model] = timing


class _UnreadLoads(LoadView):
    """Keeps the last load report of each worker as it came: a decision reads few of them."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._payloads: dict[str, bytes] = {}

    def update_scores(self, event: Event) -> None:
        if event.kind == "gone":
            self._payloads.pop(event.publisher, None)
        elif event.payload:
            self._payloads[event.publisher] = event.payload

    def read(self, worker: str) -> Load | None:
        """Return the last report of a worker."""
        with suppress(KeyError, *DECODE_ERRORS):
            return msgspec.msgpack.decode(self._payloads[worker], type=Load)
        return None


def usual_timing(reports: Sequence[tuple[Load, EngineInfo | None]]) -> Timing | None:
    """Return the timing of a kind by the reports of its workers; None if none has learnt one.

    Workers that compute prompts tell the cost of prompts, and those that decode the rest.
    """

    def of_role(role: str) -> Timing | None:
        loads = [
            load for load, info in reports if load.timing and (info is None or role in info.roles)
        ]
        known = max((load.steps for load in loads), default=0) / 2  # new workers know little
        timings = [load.timing for load in loads if load.steps >= known]
        return Timing(*map(median, zip(*timings, strict=True))) if timings else None

    prompts, answers = of_role("prefill"), of_role("decode")
    if prompts is None or answers is None:
        return prompts or answers
    return Timing(answers.c0, prompts.c1, answers.c2, answers.c3, prompts.c4)


async def _scrape(target: ScrapeTarget) -> str:
    address, name = target.targets[0], target.labels["process"]
    try:
        return await scrape(f"http://{address}")
    except PlaneUnavailable as error:
        raise PlaneUnavailable(f"{name} does not tell its figures: {error.message}") from None


def count_figures(text: str) -> Counter[tuple[str, str]]:
    """Return the figures of a frontend's metrics by model and name."""
    figures = Counter[tuple[str, str]]()
    for name, labels, value in _SAMPLE.findall(text):
        if figure := FIGURES.get(name):
            tags = dict(_LABEL.findall(labels))
            if tags.get("status") not in REFUSED:
                figures[tags.get("model", ""), figure] += float(value)  # type: ignore[assignment]
    return figures


def sum_changes(
    counted: Mapping[str, Counter[tuple[str, str]]], before: Mapping[str, Counter[tuple[str, str]]]
) -> Counter[tuple[str, str]]:
    """Return what all frontends have counted since `before`, and their states of now."""
    changes = Counter[tuple[str, str]]()
    for frontend, figures in counted.items():
        earlier = before.get(frontend, Counter())
        for (model, name), value in figures.items():
            change = value - earlier[model, name]
            if name in STATES:
                changes[model, name] += value
                changes[model, f"more_{name}"] += change
            else:  # a frontend that was started again counts from 0
                changes[model, name] += change if change >= 0 else value
    return changes
