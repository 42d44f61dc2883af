"""The search: what every layout would reach, and the best that keep a promise."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from dynamo.operations.configure.cases import Case, CaseArrays, Floats
from dynamo.operations.configure.catalogue import family_of
from dynamo.operations.configure.plans import Layout, Plan, Question, Workers, alike, find_layouts
from dynamo.operations.configure.predictor import Predictor, Split

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
        nearest = min(
            points,
            key=lambda plan: (max(1.0, plan.misses(question)), -plan.rate / plan.gpus),
            default=None,
        )
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
            value = plan.tokens_per_gpu if question.goal == "cost" else plan.rate
            return (-value, plan.gpus, plan.ttft_ms)

        best: dict[object, Plan] = {}
        for plan in sorted(plans, key=cost):
            best.setdefault((plan.kind, plan.layout, plan.prefill_layout), plan)
        return list(best.values())

    def _aggregated(self, layouts: Sequence[Layout]) -> Sequence[Plan]:
        """Return a plan for each layout and batch that comes near the limits."""
        if not layouts:
            return []
        options = [Workers(layout, 0, batch) for layout in layouts for batch in BATCHES]
        arrays = CaseArrays([self.case(option.layout, option.seqs) for option in options])
        forecast = self._predictor.times.forecast(arrays)
        question = self._question
        near = (forecast.tpot_ms <= SLACK * question.tpot_ms) & (forecast.load <= 0)
        near &= forecast.ttft_ms <= SLACK * SLACK * question.ttft_ms
        if not near.any():
            near = forecast.load <= max(0.0, float(forecast.load.min()))
        rates = arrays.concurrency / (forecast.ttft_ms + arrays.osl * forecast.tpot_ms)
        value = np.where(near, rates / (arrays.gpus * arrays.stages), -1.0)
        order = np.argsort(-value, kind="stable")[: min(MOST_CANDIDATES, int(near.sum()))]
        return self._with_binds(self.plans_of([options[place] for place in order]))

    def plans_of(self, options: Sequence[Workers]) -> Sequence[Plan]:
        """Return the plans of workers that all have, or all lack, prefill workers ahead. Times of
        answers are at least what reading memory takes at its full bandwidth."""
        times = self._predictor.times
        cases = [self.case(option.layout, option.seqs) for option in options]
        arrays = CaseArrays(cases)
        most = np.full(len(options), math.inf)
        if options[0].prefill_layout is None:
            estimates = self._predictor.predict(cases)
        else:
            splits = [
                Split(self.case(ahead, 1), case, option.prefill_count, option.count)
                for option, case in zip(options, cases, strict=True)
                if (ahead := option.prefill_layout)
            ]
            estimates = self._predictor.predict_split(splits)
            prompts = times.forecast(CaseArrays([split.prefill for split in splits]), prefill=False)
            workers = np.array([option.prefill_count for option in options])
            most = 1e3 / prompts.prompt_ms * PREFILL_SHARE * workers
        least = times.fastest_ms(arrays)
        ttfts, tpots = estimates.ttft_ms, np.maximum(estimates.tpot_ms, least)
        rates = 1e3 * arrays.concurrency / (ttfts[0] + arrays.osl * tpots[0])
        capacity = times.capacity(arrays)
        held = np.minimum(arrays.concurrency, capacity) / (arrays.kv_shards * arrays.stages)
        kv_gb = held * arrays.kv_bytes(arrays.isl + arrays.osl / 2) / 1e9
        weight_gb = times.held_weights(arrays) / 1e9
        columns = np.stack([*ttfts, *tpots, rates, most, weight_gb, kv_gb, capacity], 1).tolist()
        return [
            self._plan(option, numbers, option.layout.stages > 1 or far)
            for option, numbers, far in zip(options, columns, estimates.extrapolated, strict=True)
        ]

    def _plan(self, option: Workers, numbers: Sequence[float], extrapolated: bool) -> Plan:
        question, layout = self._question, option.layout
        ttft, ttft_low, ttft_high, tpot, tpot_low, tpot_high, rate, most, *memory = numbers
        count = option.count or self._replicas(layout, rate)
        ahead = option.prefill_layout
        gpus = count * layout.gpus + (option.prefill_count * ahead.gpus if ahead else 0)
        counted = gpus if question.goal == "cost" else max(gpus, question.gpus)
        rate = min(rate * count, most)
        return Plan(
            kind="disaggregated" if ahead else "aggregated",
            layout=layout,
            replicas=count,
            concurrency=option.seqs,
            prefill_layout=ahead,
            prefill_workers=option.prefill_count,
            ttft_ms=ttft,
            tpot_ms=tpot,
            ttft_bar=(ttft_low, ttft_high),
            tpot_bar=(tpot_low, tpot_high),
            rate=rate,
            tokens_per_gpu=rate * question.osl / counted,
            weight_gb=memory[0],
            kv_gb=memory[1],
            memory_gb=question.gpu.memory,
            capacity=memory[2],
            extrapolated=extrapolated,
        )

    def _replicas(self, layout: Layout, rate: float) -> int:
        """Return how many workers of `rate` requests a second the question has GPUs or load for."""
        question = self._question
        wanted = question.rate / rate if question.rate else question.gpus // layout.gpus
        return max(1, math.ceil(wanted))

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
        options: list[tuple[float, Workers]] = []
        for first, layout in enumerate(plain):
            if ahead.first_prompt_ms[first] > SLACK * question.ttft_ms:
                continue
            rate = 1e3 / float(ahead.prompt_ms[first]) * PREFILL_SHARE
            for place in np.flatnonzero(ok):
                later, batch = pairs[place]
                best = self._ratio(layout, rate, later, float(decode_rates[place]))
                if best is not None:
                    value, prefill_count, count = best
                    options.append((value, Workers(later, count, batch, layout, prefill_count)))
        options.sort(key=lambda option: option[0], reverse=True)
        chosen = [workers for _, workers in options[: MOST_CANDIDATES // 2]]
        return self._with_binds(self.plans_of(chosen)) if chosen else []

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
