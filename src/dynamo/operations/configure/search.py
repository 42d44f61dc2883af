"""The search: what every layout would reach, and the best that keep a promise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from dynamo.operations.configure.cases import Case, CaseArrays, Floats
from dynamo.operations.configure.catalogue import family_of
from dynamo.operations.configure.plans import Layout, Plan, Question, alike, find_layouts
from dynamo.operations.configure.predictor import Estimates, Predictor, Split

BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512)
MOST_WORKERS = 32
"""Prefill or decode workers of one unit of a disaggregated deployment."""
PREFILL_SHARE, DECODE_SHARE = 0.9, 0.92
"""Shares of their rates that prefill and decode workers reach together; AI Configurator's."""
MOST_CANDIDATES = 300
SLACK = 2.0
"""Candidates whose formula misses a limit by more than this factor are not corrected."""


class SearchResult(msgspec.Struct, frozen=True):
    """The answer of a search: `plans` keep the promise, best first. `points` are all that were
    estimated, for the picture; `nearest` misses the promise least. `interrupted` searches are not
    complete."""

    plans: Sequence[Plan]
    points: Sequence[Plan]
    nearest: Plan | None
    interrupted: bool = False


class Search:
    """A search for the answer to one question."""

    def __init__(self, question: Question, predictor: Predictor) -> None:
        self._question = question
        self._predictor = predictor
        self._family = family_of(question.shape)

    def run(self) -> SearchResult:
        """Return what was found. An interrupt ends the search early. Raises `ConfigError`."""
        question = self._question
        layouts = find_layouts(question)
        points: list[Plan] = []
        interrupted = False
        try:
            for engine in question.engines:
                own = [layout for layout in layouts if layout.engine == engine.name]
                points += self._aggregated(own)
                if engine.roles and question.gpus != 1:
                    for group in alike(own):
                        points += self._pairs(group)
        except KeyboardInterrupt:
            interrupted = True
        good = [plan for plan in points if plan.misses(question) <= 1 and self._bears(plan)]
        nearest = min(points, key=lambda plan: plan.misses(question), default=None)
        return SearchResult(self._rank(good), points, nearest, interrupted)

    def case(self, layout: Layout, concurrency: float) -> Case:
        """Return the case of a worker with the question's load."""
        question = self._question
        campaign = self._predictor.newest(layout.engine, self._family, question.gpu.name)
        return Case(
            shape=question.shape,
            family=self._family,
            gpu=question.gpu,
            engine=layout.engine,
            gpus=layout.tensor,
            stages=layout.stages,
            attention_dp=layout.attention_dp,
            split_experts=layout.split_experts,
            isl=question.isl,
            osl=question.osl,
            prefix=question.prefix,
            concurrency=concurrency,
            version=campaign[0],
            day=campaign[1],
            campaign_wave=campaign[2],
            kv_precision=layout.kv_precision,
        )

    def _bears(self, plan: Plan) -> bool:
        question = self._question
        in_budget = not question.gpus or plan.gpus <= question.gpus
        return in_budget and (not question.rate or plan.rate >= question.rate * 0.999)

    def _rank(self, plans: Sequence[Plan]) -> Sequence[Plan]:
        """Return the best plan of each layout, best first."""
        question = self._question

        def cost(plan: Plan) -> tuple[float, ...]:
            if question.goal == "latency":
                return (plan.ttft_ms + plan.tpot_ms * question.osl, plan.gpus)
            if question.rate:
                return (plan.gpus, -plan.tokens_per_gpu, plan.ttft_ms)
            return (-plan.tokens_per_gpu * plan.gpus, plan.gpus, plan.ttft_ms)

        best: dict[object, Plan] = {}
        for plan in sorted(plans, key=cost):
            best.setdefault((plan.kind, plan.layout, plan.prefill_layout), plan)
        return list(best.values())

    def _aggregated(self, layouts: Sequence[Layout]) -> Sequence[Plan]:
        """Return a plan for each layout and batch that comes near the limits."""
        if not layouts:
            return []
        pairs = [(layout, batch) for layout in layouts for batch in BATCHES]
        arrays = CaseArrays([self.case(layout, batch) for layout, batch in pairs])
        forecast = self._predictor.times.forecast(arrays)
        question = self._question
        near = (forecast.tpot_ms <= SLACK * question.tpot_ms) & (forecast.load <= 0)
        near &= forecast.ttft_ms <= SLACK * SLACK * question.ttft_ms
        if not near.any():
            near = forecast.load <= max(0.0, float(forecast.load.min()))
        rates = arrays.concurrency / (forecast.ttft_ms + arrays.osl * forecast.tpot_ms)
        value = rates / (arrays.gpus * arrays.stages)
        order = np.argsort(np.where(near, -value, math.inf), kind="stable")
        chosen = [pairs[place] for place in order[: min(MOST_CANDIDATES, int(near.sum()))]]
        cases = [self.case(layout, batch) for layout, batch in chosen]
        estimates = self._predictor.predict(cases)
        capacity = forecast.capacity[order]
        plans = [
            self._plan(layout, batch, estimates, place, float(capacity[place]))
            for place, (layout, batch) in enumerate(chosen)
        ]
        return self._with_binds(plans)

    def _plan(
        self, layout: Layout, batch: int, estimates: Estimates, place: int, capacity: float
    ) -> Plan:
        question = self._question
        ttft, tpot = float(estimates.ttft_ms[place]), float(estimates.tpot_ms[place])
        rate = 1e3 * batch / (ttft + question.osl * tpot)
        if question.rate:
            replicas = max(1, math.ceil(question.rate / rate))
        else:
            replicas = max(1, question.gpus // layout.gpus)
        return self._describe(
            kind="aggregated",
            layout=layout,
            replicas=replicas,
            concurrency=batch,
            estimates=estimates,
            place=place,
            rate=rate * replicas,
            capacity=capacity,
        )

    def _describe(
        self,
        *,
        kind: Literal["aggregated", "disaggregated"],
        layout: Layout,
        replicas: int,
        concurrency: int,
        estimates: Estimates,
        place: int,
        rate: float,
        capacity: float,
        prefill: tuple[Layout, int] | None = None,
    ) -> Plan:
        """Return a plan with the memory of its workers."""
        question, shape = self._question, self._question.shape
        case = self.case(layout, concurrency)
        arrays = CaseArrays([case])
        length = np.array([question.isl + question.osl / 2])
        shards = float(arrays.kv_shards[0]) * layout.stages
        kv = min(concurrency, capacity) * float(arrays.kv_bytes(length)[0]) / shards
        weights = shape.weight_bytes() / layout.gpus
        gpus = layout.gpus * replicas + (prefill[0].gpus * prefill[1] if prefill else 0)
        return Plan(
            kind=kind,
            layout=layout,
            replicas=replicas,
            concurrency=concurrency,
            prefill_layout=prefill[0] if prefill else None,
            prefill_workers=prefill[1] if prefill else 0,
            ttft_ms=float(estimates.ttft_ms[place]),
            tpot_ms=float(estimates.tpot_ms[place]),
            ttft_bar=(float(estimates.ttft_low_ms[place]), float(estimates.ttft_high_ms[place])),
            tpot_bar=(float(estimates.tpot_low_ms[place]), float(estimates.tpot_high_ms[place])),
            rate=rate,
            tokens_per_gpu=rate * question.osl / (max(gpus, question.gpus) or 1),
            weight_gb=weights / 1e9,
            kv_gb=kv / 1e9,
            memory_gb=question.gpu.memory,
            capacity=capacity,
            extrapolated=estimates.extrapolated[place] or layout.stages > 1,
        )

    def plan_of(
        self, layout: Layout, batch: int, replicas: int, prefill: tuple[Layout, int] | None
    ) -> Plan:
        """Return the plan of given workers with `batch` requests at once each."""
        case = self.case(layout, batch)
        capacity = float(self._predictor.times.capacity(CaseArrays([case]))[0])
        if prefill is None:
            estimates = self._predictor.predict([case])
        else:
            split = Split(self.case(prefill[0], 1), case, prefill[1], replicas)
            estimates = self._predictor.predict_split([split])
        ttft, tpot = float(estimates.ttft_ms[0]), float(estimates.tpot_ms[0])
        return self._describe(
            kind="disaggregated" if prefill else "aggregated",
            layout=layout,
            replicas=replicas,
            concurrency=batch,
            estimates=estimates,
            place=0,
            rate=1e3 * batch * replicas / (ttft + self._question.osl * tpot),
            capacity=capacity,
            prefill=prefill,
        )

    def _with_binds(self, plans: Sequence[Plan]) -> Sequence[Plan]:
        """Say of each plan what keeps its worker from a larger batch."""
        by_layout: dict[Layout, list[Plan]] = {}
        for plan in plans:
            by_layout.setdefault(plan.layout, []).append(plan)
        named = []
        for same in by_layout.values():
            same.sort(key=lambda plan: plan.concurrency)
            for plan, larger in zip(same, [*same[1:], None], strict=True):
                named.append(msgspec.structs.replace(plan, binds=self._binds(plan, larger)))
        return named

    def _binds(self, plan: Plan, larger: Plan | None) -> str:
        question = self._question
        bound = next((batch for batch in BATCHES if batch > plan.concurrency), None)
        if bound is None:
            return "batch"
        if larger is None or larger.concurrency > bound:
            return "memory" if bound > plan.capacity else "tpot"
        if larger.tpot_ms > question.tpot_ms:
            return "tpot"
        return "ttft" if larger.ttft_ms > question.ttft_ms else "load"

    def _pairs(self, plain: Sequence[Layout]) -> Sequence[Plan]:
        """Return plans of prefill and decode workers of these layouts."""
        question, times = self._question, self._predictor.times
        ahead = times.forecast(
            CaseArrays([self.case(layout, 1) for layout in plain]), prefill=False
        )
        pairs = [(layout, batch) for layout in plain for batch in BATCHES]
        behind = CaseArrays([self.case(layout, batch) for layout, batch in pairs])
        decode = times.forecast(behind, prefill=False)
        ok = (decode.load <= 0) & (decode.tpot_ms <= SLACK * question.tpot_ms)
        decode_rates = 1e3 * behind.concurrency / (behind.osl * decode.tpot_ms) * DECODE_SHARE
        options: list[tuple[float, int, int, int, int]] = []
        for first, layout in enumerate(plain):
            if ahead.first_prompt_ms[first] > SLACK * question.ttft_ms:
                continue
            rate = 1e3 / float(ahead.prompt_ms[first]) * PREFILL_SHARE
            for place in np.flatnonzero(ok):
                best = self._ratio(layout, rate, pairs[place][0], float(decode_rates[place]))
                if best is not None:
                    options.append((*best[:1], first, int(place), *best[1:]))
        options.sort(reverse=True)
        most = 1e3 / ahead.prompt_ms * PREFILL_SHARE
        return self._estimate_pairs(
            plain, pairs, options[: MOST_CANDIDATES // 2], decode.capacity, most
        )

    def _ratio(
        self, ahead: Layout, prefill_rate: float, behind: Layout, decode_rate: float
    ) -> tuple[float, int, int] | None:
        """Return tokens' value a GPU with the best numbers of prefill and decode workers."""
        question = self._question
        workers = np.arange(1, MOST_WORKERS + 1)
        if question.rate:
            needed: Floats = np.array([question.rate / prefill_rate, question.rate / decode_rate])
            first, later = (max(1, math.ceil(count)) for count in needed)
            gpus = first * ahead.gpus + later * behind.gpus
            fits = not question.gpus or gpus <= question.gpus
            return (question.rate / gpus, first, later) if fits else None
        firsts, laters = workers[:, None], workers[None, :]
        gpus_used = firsts * ahead.gpus + laters * behind.gpus
        rates = np.minimum(firsts * prefill_rate, laters * decode_rate)
        units = question.gpus // gpus_used
        total = np.where(units > 0, rates * units, 0.0)
        place = int(np.argmax(total))
        if not total.flat[place]:
            return None
        first, later = place // MOST_WORKERS + 1, place % MOST_WORKERS + 1
        count = int(units.flat[place])
        return float(total.flat[place]) / question.gpus, first * count, later * count

    def _estimate_pairs(
        self,
        plain: Sequence[Layout],
        pairs: Sequence[tuple[Layout, int]],
        options: Sequence[tuple[float, int, int, int, int]],
        capacity: Floats,
        most_rates: Floats,
    ) -> Sequence[Plan]:
        if not options:
            return []
        splits = []
        for _, first, place, prefill_workers, decode_workers in options:
            layout, batch = pairs[place]
            splits.append(
                Split(
                    self.case(plain[first], 1),
                    self.case(layout, batch),
                    prefill_workers,
                    decode_workers,
                )
            )
        estimates = self._predictor.predict_split(splits)
        plans = []
        for number, (_, first, place, prefill_workers, decode_workers) in enumerate(options):
            layout, batch = pairs[place]
            ttft, tpot = float(estimates.ttft_ms[number]), float(estimates.tpot_ms[number])
            rate = 1e3 * batch * decode_workers / (ttft + self._question.osl * tpot)
            rate = min(rate, float(most_rates[first]) * prefill_workers)
            plans.append(
                self._describe(
                    kind="disaggregated",
                    layout=layout,
                    replicas=decode_workers,
                    concurrency=batch,
                    estimates=estimates,
                    place=number,
                    rate=rate,
                    capacity=float(capacity[place]),
                    prefill=(plain[first], prefill_workers),
                )
            )
        return self._with_binds(plans)
