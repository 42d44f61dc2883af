"""Fits a timing to measured runs through the exact replay.

The distributions of the replay's metrics are compared with the measured ones by Levenberg and
Marquardt's method, on the logarithms of the coefficients, from several starts. The first start is
the solution of a linear problem: the time between two tokens of each answer, by what the engine had
in its batch at that time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from dynamo.core.errors import ConfigError
from dynamo.core.timing.model import Timing
from dynamo.operations.calibrate.measured import METRICS, MeasuredRun, Metrics, errors
from dynamo.operations.replay.replay import Replay, ReplayPlan

NO_TIME = Timing(0.0, 0.0)
NAMES = ("c0", "c1", "c2", "c3", "c4")
MEANINGS = {
    "c0": "the step itself (c0)",
    "c1": "prompt tokens (c1)",
    "c2": "sequences (c2)",
    "c3": "context (c3)",
    "c4": "attention of prompts (c4)",
}
MEAN_WEIGHT = 10.0
"""A mean counts as much as so many percentiles at the same relative error."""
STEP = 0.05
"""Relative change of a coefficient for derivatives. Smaller ones drown in changes of batches."""
MAX_STEP = 0.7
ITERATIONS = 24
MIN_PROGRESS = 0.2
MAX_CORRECTIONS = 3
"""After so many steps with little progress the derivatives are computed again."""
MAX_DAMPING = 1e3
START_SHAPES: Sequence[Mapping[str, float]] = [
    dict(zip(NAMES, factors, strict=True))
    for factors in ((1, 1, 1, 1, 1), (0.5, 1, 2, 1, 1), (1.2, 0.7, 0.7, 0.7, 1))
]
"""The starts are the first one times each of these."""
LONG_PROMPT_TOKENS = 4096
MIN_SHARE = 0.005
"""A coefficient with less than this effect on the metrics is 0."""
MAX_ERROR = 0.3
"""A share of the mean step with a larger standard error is refused."""
MAX_WEIGHT = 100
"""A mean of requests counts as so many of them at most."""
SMALL_SHARE = 0.2
"""Two coefficients that take less of a step together need not be told apart."""
MIN_NOISE = 0.01
"""Times of answers are taken to be this uncertain at least, as a share of their mean."""
NNLS_ROUNDS = 2000


class Calibration(msgspec.Struct, frozen=True):
    """A fitted timing. `fitted` and `tested` are (run, metric, error of the mean, error of the 99th
    percentile) on the requests that were fitted and on the others."""

    timing: Timing
    fitted: Sequence[tuple[str, str, float, float]]
    tested: Sequence[tuple[str, str, float, float]]
    replays: int
    cpu_s: float


class _Fit:
    """The runs with the plan that replays each of them, the coefficients to fit, and the replays
    so far. All other coefficients are 0."""

    def __init__(self, runs: Sequence[MeasuredRun], plan: ReplayPlan, names: Sequence[str]) -> None:
        self._runs = [(run, _plan_for(run, plan)) for run in runs]
        self.names = names
        self.replays = 0

    def timing(self, logs: Any) -> Timing:
        """Return the timing for the logarithms of the coefficients."""
        values = map(float, np.exp(logs))
        return replace(NO_TIME, **dict(zip(self.names, values, strict=True)))

    def simulate(self, timing: Timing) -> Iterator[tuple[MeasuredRun, Metrics, Metrics]]:
        """Replay all runs with a timing."""
        for run, plan in self._runs:
            groups = [replace(group, timing=timing) for group in plan.workers.groups]
            replayed = replace(plan, workers=replace(plan.workers, groups=groups))
            _, log = Replay(replayed).run(run.conversations)
            self.replays += 1
            yield run, *run.simulated(log)

    def residuals(self, logs: Any) -> Any:
        """Return the relative errors of all runs for the logarithms of the coefficients."""
        parts = []
        for run, fitted, _ in self.simulate(self.timing(logs)):
            for name in METRICS:
                target, metric = run.fitted[name], fitted[name]
                if target.mean > 0:
                    differences = np.array(metric.percentiles) - np.array(target.percentiles)
                    parts.append(differences / target.mean)
                    parts.append(np.array([MEAN_WEIGHT * (metric.mean / target.mean - 1)]))
        return np.concatenate(parts)

    def derivatives(self, logs: Any, residuals: Any) -> Any:
        """Return the changes of the residuals by the logarithm of each coefficient."""
        columns = []
        for index in range(len(logs)):
            changed = logs.copy()
            changed[index] += STEP
            columns.append((self.residuals(changed) - residuals) / STEP)
        return np.array(columns).T


def calibrate(
    runs: Sequence[MeasuredRun],
    plan: ReplayPlan,
    report: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Fit a timing to all `runs` on the cluster of `plan`. `report` gets lines of progress. Raises
    `ConfigError` where the runs cannot tell coefficients apart."""
    began_s = time.process_time()
    names, first = _solve_linear(runs, plan.workers.count * plan.workers.ranks)
    fit = _Fit(runs, plan, names)
    best: tuple[float, Any, Any] | None = None
    starts = [np.log([first[name] * shape[name] for name in names]) for shape in START_SHAPES]
    starts.sort(key=lambda logs: _cost(fit.residuals(logs)))
    for number, start in enumerate(starts[:2], 1):
        cost, logs, slopes = _descend(fit, start)
        report(f"start {number}: error {cost**0.5:.4f} after {fit.replays} replays")
        if best is None or cost < best[0]:
            best = cost, logs, slopes
    assert best is not None  # noqa: S101 - there are several starts
    _, logs, slopes = best
    effects = np.linalg.norm(slopes, axis=0)
    small = [
        name
        for name, effect in zip(names, effects, strict=True)
        if effect < MIN_SHARE * max(effects)
    ]
    timing = replace(fit.timing(logs), **dict.fromkeys(small, 0.0))
    simulated = list(fit.simulate(timing))
    return Calibration(
        timing,
        [(run.name, *each) for run, first, _ in simulated for each in errors(first, run.fitted)],
        [(run.name, *each) for run, _, rest in simulated for each in errors(rest, run.tested)],
        fit.replays,
        time.process_time() - began_s,
    )


def _plan_for(run: MeasuredRun, plan: ReplayPlan) -> ReplayPlan:
    return replace(plan, trace_block_tokens=run.block_tokens or plan.workers.block_tokens)


def _cost(residuals: Any) -> float:
    return float(residuals @ residuals)


def _descend(fit: _Fit, logs: Any) -> tuple[float, Any, Any]:
    """Return the least cost near `logs`, where it is, and the derivatives there. Between two
    computations of the derivatives they are corrected by the step taken (Broyden)."""
    residuals, damping, fresh = fit.residuals(logs), 0.1, 0
    slopes = fit.derivatives(logs, residuals)
    for _ in range(ITERATIONS):
        before = _cost(residuals)
        normal = slopes.T @ slopes
        damped = normal + damping * np.diag(np.diag(normal) + 1e-9)
        step = np.clip(np.linalg.solve(damped, -slopes.T @ residuals), -MAX_STEP, MAX_STEP)
        tried = fit.residuals(logs + step)
        if _cost(tried) < before:
            change = tried - residuals - slopes @ step
            slopes = slopes + np.outer(change, step) / max(1e-12, step @ step)
            logs, residuals, damping, fresh = logs + step, tried, damping / 3, fresh + 1
            if fresh < MAX_CORRECTIONS or _cost(residuals) < before * (1 - MIN_PROGRESS):
                continue
        elif not fresh:
            damping *= 10
            if damping > MAX_DAMPING:
                break
            continue
        slopes, fresh = fit.derivatives(logs, residuals), 0
    return _cost(residuals), logs, slopes


def _solve_linear(
    runs: Sequence[MeasuredRun], engines: int
) -> tuple[Sequence[str], Mapping[str, float]]:
    """Return the coefficients that the runs tell, with values to begin with. Raises `ConfigError`
    where two that matter cannot be told apart; of two that hardly do, one is left out."""
    parts = [_answers(run, engines) if run.times else _batches(run) for run in runs]
    features = np.concatenate([part[0] for part in parts])
    target = np.concatenate([part[1] for part in parts])
    means = np.maximum(features.mean(axis=0), 1e-9)
    features = features / means
    terms = len(NAMES) if _has_long_prompts(runs) else len(NAMES) - 1
    used = [index for index in range(terms) if features[:, index].any()]
    while True:
        shares = _nonnegative_least_squares(features[:, used], target)
        pair = _find_dependent(features[:, used], shares, target)
        if pair is None:
            break
        index, like = pair
        if shares[index] + shares[like] > SMALL_SHARE * target.mean():
            names = [MEANINGS[NAMES[used[each]]] for each in pair]
            raise ConfigError(
                f"the time of {names[0]} cannot be told from that of {names[1]}: both grow "
                "together in these runs",
                hint="add runs with other loads and lengths: some requests at a time, then many; "
                "short prompts, then long ones",
            )
        del used[max(pair)]
    values = np.maximum(shares, 0.01 * target.mean()) / means[used]
    names = [NAMES[index] for index in used]
    return names, dict(zip(names, map(float, values), strict=True))


def _find_dependent(features: Any, shares: Any, target: Any) -> tuple[int, int] | None:
    """Return a coefficient that is uncertain, and the one with which its work grows; None if there
    is none. The standard error of its share of a step tells."""
    indices = range(len(shares))
    noise = max(float(np.std(features @ shares - target)), MIN_NOISE * target.mean())
    for index in indices:
        others = [other for other in indices if other != index]
        column, rest = features[:, index], features[:, others]
        weights, *_ = np.linalg.lstsq(rest, column, rcond=None)
        own = float(np.linalg.norm(column - rest @ weights))
        if noise > MAX_ERROR * own * target.mean():
            return index, others[int(np.argmax(np.abs(weights)))]
    return None


def _has_long_prompts(runs: Sequence[MeasuredRun]) -> bool:
    """Whether prompts are long enough for their attention to be seen, and differ in length."""
    lengths = [
        turn.prompt_tokens for run in runs for each in run.conversations for turn in each.requests
    ]
    return max(lengths) >= LONG_PROMPT_TOKENS and max(lengths) >= 2 * sum(lengths) / len(lengths)


def _batches(run: MeasuredRun) -> tuple[Any, Any]:
    """Return the features and the time of two steps of a run without times of single requests: the
    mean step that decodes, and one that computes the mean prompt alone."""
    turns = [turn for each in run.conversations for turn in each.requests]
    prompt = sum(turn.prompt_tokens for turn in turns) / len(turns)
    answer = sum(turn.output_tokens for turn in turns) / len(turns)
    e2e_s, token_ms = run.fitted["E2E"].mean, run.fitted["TPOT"].mean * 1e3
    open_s = run.conversations[-1].start_s
    batch = len(turns) / open_s * e2e_s if open_s else float(len(run.conversations))
    attention = prompt * prompt / 2
    context = batch * (prompt + answer / 2)
    decode = (1, prompt * batch / answer, batch, context, attention * batch / answer)
    prefill = (1, prompt, 1, 0, attention)
    times = [token_ms, run.fitted["TTFT"].percentiles[0] * 1e3]
    weight = min(len(turns), MAX_WEIGHT)
    return np.repeat([decode, prefill], weight, axis=0), np.repeat(times, weight)


def _answers(run: MeasuredRun, engines: int) -> tuple[Any, Any]:
    """Return the features and the mean time of the steps in which an engine decoded each answer.
    Their features include the prompts that it computed meanwhile. Prompts that it computed alone
    have a row each, too."""
    columns = ("arrived_s", "first_s", "last_s", "prompt_tokens", "output_tokens")
    arrived, first, last, prompts, tokens = (
        np.array([getattr(each, name) for each in run.times.values()]) for name in columns
    )
    rows, targets = [], []
    for at in np.flatnonzero((tokens > 1) & (last > first)):
        begin, end, steps = first[at], last[at], tokens[at] - 1
        overlap = np.clip(np.minimum(end, last) - np.maximum(begin, first), 0, None)
        middle = (np.minimum(end, last) + np.maximum(begin, first)) / 2
        age = np.clip((middle - first) / np.maximum(1e-9, last - first), 0, 1)
        batch = overlap / (end - begin) / engines
        computed = prompts[(begin < first) & (first <= end)] / steps / engines
        attention = computed @ prompts[(begin < first) & (first <= end)] / 2
        context = batch @ (prompts + age * tokens)
        rows.append((1, computed.sum(), batch.sum(), context, attention))
        targets.append((end - begin) / steps * 1e3)
    for index, start in enumerate(arrived.tolist()):
        if np.sum((arrived <= first[index]) & (last >= start)) == 1:
            rows.append((1, prompts[index], 1, 0, prompts[index] ** 2 / 2))
            targets.append((first[index] - start) * 1e3)
    return np.array(rows), np.array(targets)


def _nonnegative_least_squares(features: Any, target: Any) -> Any:
    """Solve by coordinate descent."""
    normal, right = features.T @ features, features.T @ target
    solution = np.zeros(len(right))
    for _ in range(NNLS_ROUNDS):
        for index in range(len(right)):
            rest = right[index] - normal[index] @ solution + normal[index, index] * solution[index]
            solution[index] = max(0.0, rest / normal[index, index])
    return solution
