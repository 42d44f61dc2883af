"""Every alert is active while its cause lasts, and not without it: by our evaluator and by
Prometheus."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import pytest

from dynamo.operations.alerts.conditions import prometheus_rules
from dynamo.operations.alerts.evaluator import AlertEvaluator, MetricSample, parse_samples
from dynamo.operations.alerts.rules import ROUTING_RULES, RULES

STEP_S = 15
BEGIN, END, LAST = 10, 14, 45
"""The cause is there in the steps from BEGIN to END. LAST: the steps of a series."""
PROMPT_S = 60
Values = Sequence[float]
SUPERVISOR = 'process="supervisor",role="supervisor"'
FRONTEND = 'process="frontend",role="frontend"'
REQUESTS = "dynamo_frontend_requests_total{%s,model=%r,endpoint=%r,status=%r}".replace("%r", '"%s"')


class Provocation(NamedTuple):
    """Series by their text, and whose labels the alert has. `resolved` is the step from which the
    alert is not active any more."""

    series: Mapping[str, Values]
    labels: Mapping[str, str] = {}
    resolved: int = END + 8


def level(normal: float, broken: float) -> Values:
    """Return a gauge that is broken from BEGIN to END."""
    return [broken if BEGIN <= step < END else normal for step in range(LAST)]


def counter(normal: float, broken: float) -> Values:
    """Return a counter that grows by these values a step."""
    values, total = [], 100.0
    for growth in level(normal, broken):
        total += growth
        values.append(total)
    return values


def late(histogram: str, bound: str, of: float) -> Mapping[str, Values]:
    """Return a histogram of which all values are on time, or none is while the cause lasts."""
    labels = f'{FRONTEND},model="m"'
    return {
        f'{histogram}_bucket{{{labels},le="{bound}"}}': counter(of, 0),
        f"{histogram}_count{{{labels}}}": counter(of, of),
    }


def answers(failed: float, resolved: int) -> Provocation:
    ok = REQUESTS % (FRONTEND, "m", "chat", "200")
    bad = REQUESTS % (FRONTEND, "m", "chat", "503")
    return Provocation({ok: counter(50, 50), bad: counter(0, failed)}, resolved=resolved)


def restarts(growth: float) -> Mapping[str, Values]:
    return {
        f'dynamo_supervisor_restarts_total{{{SUPERVISOR},name="worker-1",child_role="worker"}}': counter(
            0, growth
        ),
        f'dynamo_supervisor_restarts_total{{{SUPERVISOR},name="frontend",child_role="frontend"}}': counter(
            0, growth
        ),
    }


FIRST_TOKENS = "dynamo_frontend_time_to_first_token_seconds"
GAPS = "dynamo_frontend_inter_token_latency_seconds"
NO_WORKERS = {
    f'dynamo_frontend_workers{{{FRONTEND},model="m"}}': level(2, 0),
    f'dynamo_frontend_workers{{{FRONTEND},model="idle"}}': level(0, 0),
    f'dynamo_model_state{{{FRONTEND},model="m",state="unloaded"}}': level(0, 0),
    f'dynamo_model_state{{{FRONTEND},model="idle",state="unloaded"}}': level(1, 1),
}
PROVOKED: Mapping[str, Provocation] = {
    "WorkerLost": Provocation(restarts(0.25), {"name": "worker-1"}),
    "WorkerFlapping": Provocation(restarts(2), {"name": "worker-1"}, END + 22),
    "WorkerHung": Provocation(
        {f'dynamo_supervisor_hung_total{{{SUPERVISOR},name="worker-2"}}': counter(0, 0.5)},
        {"name": "worker-2"},
    ),
    "WorkerUnreachable": Provocation(
        {f'dynamo_frontend_unusable_workers{{{FRONTEND},reason="refused"}}': level(0, 1)},
        {"reason": "refused"},
    ),
    "NoWorkers": Provocation(NO_WORKERS, {"model": "m"}),
    "CapacityShort": Provocation(
        {
            f'dynamo_admission_rejected_total{{{FRONTEND},model="m",reason="late"}}': counter(0, 5),
            REQUESTS % (FRONTEND, "m", "chat", "200"): counter(50, 50),
        }
    ),
    "FirstTokenLate": Provocation(late(FIRST_TOKENS, "5.0", 10)),
    "TokensStall": Provocation(late(GAPS, "2.0", 100)),
    "BudgetBurnsFast": answers(10, END + 25),
    "BudgetBurns": answers(6, END + 130),
    "BudgetBurnsSlow": answers(5, END + 1450),
    "CacheThrashing": Provocation(
        {
            f'dynamo_router_seen_blocks_total{{{FRONTEND},model="m"}}': counter(900, 900),
            f'dynamo_router_reachable_blocks_total{{{FRONTEND},model="m"}}': counter(900, 0),
            f'dynamo_router_prompt_blocks_total{{{FRONTEND},model="m"}}': counter(1000, 1000),
        },
        resolved=END + 12,
    ),
    "EventsLost": Provocation(
        {f'dynamo_kv_index_events_lost_total{{{FRONTEND},model="m"}}': counter(0, 1)}
    ),
    "PlaneAway": Provocation(
        {f'dynamo_plane_up_ratio{{{FRONTEND},plane="events"}}': level(1, 0)}, {"plane": "events"}
    ),
    "TransferFailing": Provocation(
        {f'dynamo_worker_prefill_fallbacks_total{{{FRONTEND},reason="gone"}}': counter(0, 4)},
        {"reason": "gone"},
    ),
    "TierFailing": Provocation(
        {
            'dynamo_worker_tier_up_ratio{process="worker-1",tier="disk"}': level(1, 0),
            'dynamo_worker_tier_up_ratio{process="worker-2",tier="disk"}': level(1, 1),
        },
        {"process": "worker-1", "tier": "disk"},
    ),
    "LoopStalls": Provocation(
        {'dynamo_loop_stalls_total{process="worker-1"}': counter(1, 20)}, {"process": "worker-1"}
    ),
    "DiskFull": Provocation({f"dynamo_supervisor_disk_full_ratio{{{SUPERVISOR}}}": level(0, 1)}),
    "FilesNearLimit": Provocation(
        {
            f"process_open_fds{{{FRONTEND}}}": level(500, 950),
            f"process_max_fds{{{FRONTEND}}}": level(1000, 1000),
        },
        {"process": "frontend"},
    ),
    "VersionsDiffer": Provocation(
        {
            f'dynamo_build_info{{{FRONTEND},version="1.0"}}': level(1, 1),
            'dynamo_build_info{process="worker-1",version="1.1"}': [
                float("nan") if not BEGIN <= step < END else 1 for step in range(LAST)
            ],
        }
    ),
    **{
        rule.name: Provocation(
            {f'dynamo_router_alert_ratio{{{FRONTEND},model="m",alert="{rule.name}"}}': level(0, 2)}
        )
        for rule in ROUTING_RULES
    },
}
NAMES = sorted(PROVOKED)


def series_length(provocation: Provocation) -> int:
    return max(LAST, provocation.resolved + 1)


def evaluate(provocation: Provocation) -> list[list[tuple[str, Mapping[str, str]]]]:
    """Return the active alerts of each step."""
    evaluator = AlertEvaluator(RULES)
    active = []
    for step in range(series_length(provocation)):
        samples: list[MetricSample] = []
        for series, values in provocation.series.items():
            value = values[min(step, LAST - 1)]
            if value == value:
                samples += parse_samples(f"{series} {value}\n", evaluator.metrics, {})
        firing = evaluator.update(samples, 1000.0 + step * STEP_S)
        active.append([(alert.rule.name, alert.labels) for alert in firing])
    return active


def test_each_alert_has_a_provocation() -> None:
    assert {rule.name for rule in RULES} == PROVOKED.keys()
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("name", NAMES)
def test_an_alert_begins_with_its_cause_and_ends_after_it(name: str) -> None:
    provocation = PROVOKED[name]
    active = evaluate(provocation)
    alert = (name, provocation.labels)
    assert not any(active[:BEGIN])
    assert alert in active[BEGIN + PROMPT_S // STEP_S - 1]
    assert alert not in active[provocation.resolved]


def test_a_share_of_few_requests_is_no_alert() -> None:
    assert not any(evaluate(Provocation(late(FIRST_TOKENS, "5.0", 0.1))))


def promtool_values(values: Values, length: int) -> str:
    words = ["stale" if value != value else f"{value:g}" for value in values]
    words += repeat(words[-1], length - len(words))
    return " ".join(words)


def rule_test(name: str) -> Mapping[str, object]:
    """Return promtool's test of one alert."""
    provocation = PROVOKED[name]
    rule = next(rule for rule in RULES if rule.name == name)
    length = series_length(provocation)
    expected = {
        "exp_labels": {"severity": rule.severity, **provocation.labels},
        "exp_annotations": {"summary": rule.felt, "description": rule.general_advice},
    }
    steps = {BEGIN - 1: [], BEGIN + PROMPT_S // STEP_S - 1: [expected], provocation.resolved: []}
    return {
        "interval": f"{STEP_S}s",
        "input_series": [
            {"series": series, "values": promtool_values(values, length)}
            for series, values in provocation.series.items()
        ],
        "alert_rule_test": [
            {"eval_time": f"{step * STEP_S}s", "alertname": name, "exp_alerts": alerts}
            for step, alerts in steps.items()
        ],
    }


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on the path")
def test_prometheus_agrees(tmp_path: Path) -> None:
    rules, tests = tmp_path / "rules.yml", tmp_path / "tests.yml"
    rules.write_text(json.dumps(prometheus_rules(RULES)))
    document = {
        "rule_files": [rules.name],
        "evaluation_interval": f"{STEP_S}s",
        "tests": [rule_test(name) for name in NAMES],
    }
    tests.write_text(json.dumps(document))
    subprocess.run(["promtool", "check", "rules", rules], check=True)
    done = subprocess.run(["promtool", "test", "rules", tests], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
