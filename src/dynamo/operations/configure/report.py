"""The result of a search as a table, as text, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from dynamo.operations.configure.finalists import LOAD, Replayed
from dynamo.operations.configure.plans import Plan, Question
from dynamo.operations.configure.search import SearchResult

PARETO_INCHES = (8.0, 5.0)
LONG_MS = 1000
ENOUGH = 0.8
"""Share of answers in time from which on a replay keeps the promise."""
REPLAY_NOTE = (
    f"Workers with these step times under Poisson arrivals at {LOAD:.0%} of the rate. A replay has "
    "the time of the engine only, not that of its server. Flexible workers compute prompts for "
    "each other, in mode kv."
)
BINDING = {
    "tpot": "a larger batch breaks the limit on TPOT",
    "ttft": "a larger batch breaks the limit on TTFT",
    "memory": "the KV of a larger batch does not fit",
    "batch": "it is the largest batch that is searched",
    "load": "the other workers or the load, not this worker",
}
HEADER = (
    "", "kind", "engine", "workers", "batch", "TTFT", "TPOT", "tokens/s/GPU", "requests/s", "GPUs",
    "memory a GPU", "binds", "",
)  # fmt: skip


def plan_name(plan: Plan) -> str:
    """Return the workers of a plan, such as 4 x tp8."""
    name = f"{plan.replicas} x {plan.layout.name}"
    if plan.prefill_layout is None:
        return name
    return f"{plan.prefill_workers} x {plan.prefill_layout.name} + {name}"


def table_rows(plans: Sequence[Plan]) -> Sequence[Sequence[str]]:
    """Return the cells of a table of plans."""
    rows = [HEADER]
    for number, plan in enumerate(plans, 1):
        rows.append(
            (
                str(number),
                plan.kind,
                plan.layout.engine,
                plan_name(plan),
                str(plan.concurrency),
                _with_bar(plan.ttft_ms, plan.ttft_bar),
                _with_bar(plan.tpot_ms, plan.tpot_bar),
                f"{plan.tokens_per_gpu:.0f}",
                f"{plan.rate:.2f}",
                str(plan.gpus),
                f"{plan.weight_gb:.0f} + {plan.kv_gb:.1f} of {plan.memory_gb:.0f} GB",
                plan.binds,
                "extrapolated" if plan.extrapolated else "",
            )
        )
    return rows


def promise_text(question: Question) -> str:
    """Return the limits in words."""
    limits = [
        f"{name} {limit:g} ms"
        for name, limit in (("TTFT", question.ttft_ms), ("TPOT", question.tpot_ms))
        if limit < math.inf
    ]
    return " and ".join(limits) or "no limits"


def explain_failure(result: SearchResult, question: Question) -> tuple[str, str]:
    """Return what keeps every plan from the promise, and the nearest one that would fit."""
    nearest = result.nearest
    if nearest is None:
        return "no layout of this model was found", "more GPUs, or shorter weights (--precision)"
    over_ttft = nearest.ttft_ms / question.ttft_ms
    over_tpot = nearest.tpot_ms / question.tpot_ms
    if max(over_ttft, over_tpot) <= 1:
        most = nearest.rate / nearest.gpus * question.gpus
        if nearest.prefill_layout is None:
            workers = question.gpus // nearest.layout.gpus
            most = nearest.rate / nearest.replicas * workers
        most = math.floor(100 * most) / 100
        text = f"{question.gpus} {question.gpu.name} bear at most {most:g} requests/s"
        return text, f"--rate {most:g}, or more GPUs"
    what = "TTFT" if over_ttft > over_tpot else "TPOT"
    text = (
        f"nothing keeps {promise_text(question)}: {what} binds. The nearest is "
        f"{nearest.layout.engine} {plan_name(nearest)} with batch {nearest.concurrency}: TTFT "
        f"{nearest.ttft_ms:.0f} ms, TPOT {nearest.tpot_ms:.1f} ms"
    )
    limits = [
        f"{name}={max(limit, math.ceil(reached)):.0f}ms"
        for name, limit, reached in (
            ("ttft", question.ttft_ms, nearest.ttft_ms),
            ("tpot", question.tpot_ms, nearest.tpot_ms),
        )
        if limit < math.inf
    ]
    return text, f"--good {','.join(limits)} would fit; or other GPUs, shorter weights"


def why_text(
    result: SearchResult, question: Question, replayed: Sequence[Replayed], price: float
) -> str:
    """Return `why.md`: the choice, what binds, and what it rests on."""
    best = result.plans[0]
    lines = [
        f"# {question.shape.name} on {question.gpu.name}",
        f"Asked: {_asked(question)}.",
        f"Chosen: {_plan_text(best)}.",
        *(
            ["Interrupted: better plans may exist, or replays are missing."]
            if result.interrupted
            else []
        ),
        _list(_facts(best, question, price)),
        "## Memory of a GPU",
        _list(_memory(best, question)),
    ]
    if replayed:
        lines += [
            "## Replay",
            REPLAY_NOTE,
            _list(map(_replay_text, replayed)),
        ]
    if len(result.plans) > 1:
        lines += ["## Others", _list(map(_other_text, result.plans[1:8]))]
    return "\n\n".join(lines) + "\n"


def _list(facts: Iterable[str]) -> str:
    return "\n".join(f"- {fact}" for fact in facts)


def _plan_text(plan: Plan) -> str:
    return f"{plan.kind}, {plan.layout.engine}, {plan_name(plan)}, batch {plan.concurrency}"


def _facts(best: Plan, question: Question, price: float) -> Iterator[str]:
    if best.extrapolated:
        yield "Extrapolated: no measured run is near. Measure before you buy."
    what = "requests" if best.layout.attention_dp else "layers"
    yield (
        f"Each of {best.replicas} workers that answer divides {what} among {best.layout.gpus} GPUs "
        f"({best.layout.name}); batch is how many requests run in it at once."
    )
    yield f"TTFT, the mean time to the first token: {_with_bar(best.ttft_ms, best.ttft_bar)}."
    yield f"TPOT, the mean time of each later token: {_with_bar(best.tpot_ms, best.tpot_bar)}."
    yield (
        "Both are formulas, corrected by measured runs like this one. In brackets are bars: four "
        "measurements of five lie within such."
    )
    yield f"What binds: {BINDING[best.binds]}."
    ahead = ", or what the prefill workers bear if that is less" if best.prefill_layout else ""
    yield (
        f"{best.rate:.2f} requests/s: {best.replicas} x {best.concurrency} requests, each of "
        f"TTFT + {question.osl} x TPOT{ahead}."
    )
    yield (
        f"{best.tokens_per_gpu:.0f} tokens/s/GPU of answers; {best.tokens_per_user:.0f} tokens/s "
        f"for each reader (1 / TPOT); {best.gpus} GPUs in use."
    )
    dollars = 1e6 * price / 3600 / max(1e-9, best.tokens_per_gpu)
    yield (
        f"{dollars:.2f} USD a million tokens of answer, at {price:g} USD a GPU hour (--price sets "
        "yours) and full load."
    )


def _memory(best: Plan, question: Question) -> Iterator[str]:
    shape = question.shape
    yield (
        f"Weights: {best.weight_gb:.1f} GB. The model has {shape.weights / 1e9:.1f} billion in "
        f"{shape.precision}, of which a token uses {shape.active_weights / 1e9:.1f} billion."
    )
    yield (
        f"KV in {best.layout.kv_precision}: {best.kv_gb:.1f} GB for the batch, at "
        f"{question.isl} + {question.osl} / 2 tokens a request. {best.capacity:.0f} would fit."
    )
    yield f"A {question.gpu.name} has {best.memory_gb:g} GB; the engine needs some for itself."


def _replay_text(outcome: Replayed) -> str:
    good = "" if outcome.good_share is None else f", {outcome.good_share:.0%} in time"
    if outcome.good_share is not None and outcome.good_share < ENOUGH:
        good += ": too few, plan with a lower --rate for each GPU"
    return (
        f"{outcome.kind}: {outcome.rate:.2f} requests/s, TTFT mean {outcome.ttft_ms:.0f} ms, p90 "
        f"{outcome.ttft_p90_ms:.0f} ms, TPOT {outcome.tpot_ms:.1f} ms, "
        f"{outcome.tokens_per_gpu:.0f} tokens/s/GPU{good}"
    )


def _other_text(plan: Plan) -> str:
    mark = " (extrapolated)" if plan.extrapolated else ""
    return (
        f"{_plan_text(plan)}: {plan.tokens_per_gpu:.0f} tokens/s/GPU, TTFT {plan.ttft_ms:.0f} ms, "
        f"TPOT {plan.tpot_ms:.1f} ms, {plan.gpus} GPUs{mark}"
    )


def _with_bar(value: float, bar: tuple[float, float]) -> str:
    short, low, high = (
        f"{time:.0f}" if time >= LONG_MS else f"{time:.4g}" for time in (value, *bar)
    )
    return f"{short} ms ({low} to {high})"


def _asked(question: Question) -> str:
    budget = [f"{question.gpus} GPUs"] if question.gpus else []
    budget += [f"{question.rate:g} requests/s"] if question.rate else []
    return (
        f"{question.isl} prompt tokens, {question.prefix} of them cached, "
        f"{question.osl} of answer; {' for '.join(budget)}; {promise_text(question)}; "
        f"goal {question.goal}"
    )


def draw_pareto(result: SearchResult, question: Question, path: str) -> None:
    """Draw tokens per second and GPU over tokens per second and user of both kinds into a PNG file,
    with the promise. Raises `Unsupported` without matplotlib. Blocks."""
    from dynamo.operations.plotting import LIMIT_STYLE, check_matplotlib, make_panels

    check_matplotlib()
    figure, (panel,) = make_panels(1, 1, PARETO_INCHES)
    ttft = f"TTFT {question.ttft_ms:g} ms" if question.ttft_ms < math.inf else "any TTFT"
    for kind in ("aggregated", "disaggregated"):
        points = [plan for plan in result.points if plan.kind == kind]
        users = [plan.tokens_per_user for plan in points]
        dots = panel.plot(users, [plan.tokens_per_gpu for plan in points], ".", alpha=0.3)
        front = pareto_front([plan for plan in points if plan.ttft_ms <= question.ttft_ms])
        panel.plot(
            [plan.tokens_per_user for plan in front],
            [plan.tokens_per_gpu for plan in front],
            "o-",
            color=dots[0].get_color(),
            label=f"{kind}, best within {ttft}",
        )
    best = result.plans[0]
    panel.plot(best.tokens_per_user, best.tokens_per_gpu, "k*", ms=14, mfc="none", label="chosen")
    if question.tpot_ms < math.inf:
        panel.axvline(1e3 / question.tpot_ms, label=f"TPOT {question.tpot_ms:g} ms", **LIMIT_STYLE)
    title = f"{question.shape.name} on {question.gpu.name}, {question.isl} + {question.osl} tokens"
    panel.set(title=title, xlabel="tokens/s/user")
    panel.set(ylabel="tokens/s/GPU", xlim=(0, None), ylim=(0, None))
    panel.grid(visible=True, alpha=0.3)
    panel.legend(fontsize=8)
    figure.savefig(path, format="png")


def pareto_front(plans: Sequence[Plan]) -> Sequence[Plan]:
    """Return the plans that no other one beats in both rates, by falling tokens a user."""
    front: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: -plan.tokens_per_user):
        if not front or plan.tokens_per_gpu > front[-1].tokens_per_gpu:
            front.append(plan)
    return front
