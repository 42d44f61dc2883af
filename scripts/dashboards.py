"""Dashboards of Grafana and rules of Prometheus, made from one place; scripts/reference.py writes
them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from dynamo.operations.alerts.conditions import prometheus_rules
from dynamo.operations.alerts.rules import RULES

RULES_FILE = "deploy/prometheus-rules.yml"
COLUMNS, WIDTH, HEIGHT = 3, 8, 8
DATASOURCE = {"type": "prometheus", "uid": "prometheus"}
MODEL = 'model=~"$model"'
WORKER = 'process=~"$worker"'
RATE = "[$__rate_interval]"
_PAGE = re.compile(r"docs/[a-z/-]+\.md")


class Panel(NamedTuple):
    """A time series panel: its queries by legend, and `text`, which names a page of the guide."""

    title: str
    unit: str
    queries: Mapping[str, str]
    text: str = ""


def quantiles(histogram: str, by: str = "", matcher: str = MODEL) -> Mapping[str, str]:
    """Return the queries for p50, p90 and p99 of a histogram."""
    rate = f"sum by (le{by}) (rate({histogram}_bucket{{{matcher}}}{RATE}))"
    return {f"p{share}": f"histogram_quantile({share / 100:g}, {rate})" for share in (50, 90, 99)}


def rate(counter: str, by: str = "", matcher: str = "") -> str:
    """Return the query for the growth of a counter a second."""
    group = f" by ({by})" if by else ""
    selector = f"{counter}{{{matcher}}}" if matcher else counter
    return f"sum{group} (rate({selector}{RATE}))"


def growth(counter: str, by: str) -> str:
    """Return the query for the growth of a counter in an interval."""
    return f"sum by ({by}) (increase({counter}{RATE}))"


SERVING = (
    Panel(
        "Requests by status", "reqps",
        {"{{status}}": rate("dynamo_frontend_requests_total", "status")},
        "docs/how-to/troubleshooting.md says what each status means.",
    ),
    Panel(
        "Requests in flight, waiting", "short",
        {
            "in flight": "sum(dynamo_frontend_inflight_requests)",
            "queued in the frontend": "sum(dynamo_frontend_queued_requests)",
            "queued at admission": f"sum(dynamo_admission_waiting_requests{{{MODEL}}})",
            "queued in the router": f"sum(dynamo_router_waiting_requests{{{MODEL}}})",
        },
        "docs/how-to/reliability.md: overload.",
    ),
    Panel(
        "Workers known to frontends", "short",
        {
            "{{model}}": f"max by (model) (dynamo_frontend_workers{{{MODEL}}})",
            "unusable: {{reason}}": "max by (reason) (dynamo_frontend_unusable_workers)",
        },
        "docs/reference/alerts.md: NoWorkers, WorkerUnreachable.",
    ),
    Panel("Time to first token", "s", quantiles("dynamo_frontend_time_to_first_token_seconds")),
    Panel("Inter-token latency", "s", quantiles("dynamo_frontend_inter_token_latency_seconds")),
    Panel("Request duration", "s", quantiles("dynamo_frontend_request_duration_seconds")),
    Panel(
        "Seconds of a request by stage (mean)", "s",
        {
            "{{stage}}": f"{rate('dynamo_request_stage_seconds_sum', 'stage', MODEL)} / on () "
            f"group_left () {rate('dynamo_frontend_request_duration_seconds_count', '', MODEL)}",
        },
        "docs/how-to/why.md tells what each stage is.",
    ),
    Panel(
        "Longest pause of an answer", "s", quantiles("dynamo_request_longest_gap_seconds"),
        "docs/reference/alerts.md: TokensStall.",
    ),
    Panel(
        "Tokens computed again, after preemptions", "short",
        {"tokens": rate("dynamo_request_recomputed_tokens_total", matcher=MODEL)},
        "docs/how-to/kv-memory.md.",
    ),
    Panel(
        "Tokens", "short",
        {
            "prompt": rate("dynamo_frontend_input_tokens_total", matcher=MODEL),
            "generated": rate("dynamo_frontend_output_tokens_total", matcher=MODEL),
        },
    ),
    Panel(
        "Cached share of prompt tokens", "percentunit",
        {
            "cached": f"{rate('dynamo_frontend_cached_tokens_total', matcher=MODEL)} / "
            f"{rate('dynamo_frontend_input_tokens_total', matcher=MODEL)}",
            "share of reachable blocks": f"{rate('dynamo_router_hit_blocks_total', matcher=MODEL)}"
            f" / {rate('dynamo_router_reachable_blocks_total', matcher=MODEL)}",
        },
        "docs/how-to/routing.md.",
    ),
    Panel(
        "Rejections by admission", "reqps",
        {"{{reason}}": rate("dynamo_admission_rejected_total", "reason", MODEL)},
        "docs/reference/alerts.md: CapacityShort.",
    ),
    Panel(
        "Planes (1: connected, 0: disconnected)", "short",
        {"{{plane}}": "min by (plane) (dynamo_plane_up_ratio)"},
        "docs/reference/alerts.md: PlaneAway.",
    ),
    Panel(
        "Active alerts", "short",
        {"{{alert}}": "max by (alert) (dynamo_alert_active)"},
        "docs/reference/alerts.md lists all alerts, and what to do.",
    ),
    Panel(
        "Routing alerts (above 1: limit exceeded)", "short",
        {"{{alert}}": f"max by (alert) (dynamo_router_alert_ratio{{{MODEL}}})"},
        "docs/how-to/routing.md.",
    ),
)  # fmt: skip
WORKERS = (
    Panel(
        "Batch and queue by worker", "short",
        {
            "running {{process}}": f"dynamo_worker_running_requests{{{WORKER}}}",
            "waiting {{process}}": f"dynamo_worker_waiting_requests{{{WORKER}}}",
        },
    ),
    Panel(
        "Requests of a step", "short",
        quantiles("dynamo_worker_batch_requests", matcher=WORKER),
    ),
    Panel(
        "Time of a step", "s",
        quantiles("dynamo_worker_step_seconds", matcher=WORKER),
        "docs/how-to/record-and-calibrate.md.",
    ),
    Panel(
        "KV blocks in use by worker", "percentunit",
        {
            "{{process}}": f"dynamo_worker_active_blocks{{{WORKER}}} / "
            f"dynamo_worker_blocks{{{WORKER}}}",
        },
        "docs/how-to/kv-memory.md.",
    ),
    Panel(
        "Preemptions, evictions", "short",
        {
            "requests preempted": rate("dynamo_worker_preemptions_total", matcher=WORKER),
            "blocks evicted": rate("dynamo_worker_evicted_blocks_total", matcher=WORKER),
        },
        "docs/reference/alerts.md: CacheThrashing.",
    ),
    Panel(
        "Processes by state", "short",
        {"{{child_role}} {{state}}": "sum by (child_role, state) (dynamo_supervisor_processes)"},
        "`dynamo ps` lists them.",
    ),
    Panel(
        "Restarted, hung and ejected", "short",
        {
            "restarted: {{name}}": growth("dynamo_supervisor_restarts_total", "name"),
            "hung: {{name}}": growth("dynamo_supervisor_hung_total", "name"),
            "ejected: {{reason}}": growth("dynamo_workers_ejected_total", "reason"),
            "frozen": f"sum(increase(dynamo_workers_frozen_total{RATE}))",
        },
        "docs/reference/alerts.md: WorkerLost, WorkerHung, WorkerFlapping.",
    ),
    Panel(
        "Migrations", "short",
        {
            "{{reason}}": growth("dynamo_migrations_total", "reason"),
            "failed": f"sum(increase(dynamo_migrations_failed_total{RATE}))",
        },
        "docs/how-to/reliability.md.",
    ),
    Panel("Memory by process", "bytes", {"{{process}}": "process_resident_memory_bytes"}),
    Panel(
        "CPU by process", "short", {"{{process}}": f"rate(process_cpu_seconds_total{RATE})"}
    ),
    Panel(
        "Event loop lag (p99)", "s",
        {
            "{{process}}": "histogram_quantile(0.99, sum by (le, process) "
            f"(rate(dynamo_runtime_loop_pause_seconds_bucket{RATE})))",
        },
        "docs/reference/alerts.md: LoopStalls.",
    ),
    Panel(
        "Open files: share of the limit", "percentunit",
        {"{{process}}": "process_open_fds / process_max_fds"},
        "docs/reference/alerts.md: FilesNearLimit.",
    ),
    Panel(
        "Versions", "short",
        {"{{version}}": "count by (version) (dynamo_build_info)"},
        "docs/reference/alerts.md: VersionsDiffer.",
    ),
)  # fmt: skip
TRANSFERS = (
    Panel(
        "Remote prompts and fallbacks", "reqps",
        {
            "prompts of other workers": rate("dynamo_worker_remote_prompts_total", matcher=WORKER),
            "fallback: {{reason}}": rate("dynamo_worker_prefill_fallbacks_total", "reason", WORKER),
        },
        "docs/how-to/disaggregation.md, docs/reference/alerts.md: TransferFailing.",
    ),
    Panel(
        "Time of a pull", "s", quantiles("dynamo_transfer_seconds", matcher=WORKER),
        "docs/architecture/planes.md.",
    ),
    Panel(
        "KV bytes pulled", "Bps",
        {"{{backend}}": rate("dynamo_transfer_bytes_total", "backend", WORKER)},
    ),
    Panel(
        "KV bytes from other workers", "Bps",
        {"{{peer}}": rate("dynamo_worker_peer_bytes_total", "peer", WORKER)},
    ),
    Panel(
        "Tiers: used share of their room", "percentunit",
        {
            "{{tier}}": f"sum by (tier) (dynamo_worker_tier_blocks{{{WORKER}}}) / "
            f"sum by (tier) (dynamo_worker_tier_capacity_blocks{{{WORKER}}})",
        },
        "docs/how-to/kv-memory.md.",
    ),
    Panel(
        "Tiers: blocks loaded, stored, evicted", "short",
        {"{{change}} {{tier}}": rate("dynamo_worker_tier_blocks_total", "tier, change", WORKER)},
    ),
    Panel(
        "Tiers: failures, and whether they work", "short",
        {
            "failures {{tier}}": rate("dynamo_worker_tier_failures_total", "tier", WORKER),
            "works {{tier}}": f"min by (tier) (dynamo_worker_tier_up_ratio{{{WORKER}}})",
        },
        "docs/reference/alerts.md: TierFailing.",
    ),
    Panel(
        "Seconds of loads from a tier, a second", "short",
        {"{{tier}}": rate("dynamo_worker_tier_load_seconds_total", "tier", WORKER)},
    ),
)  # fmt: skip


def failed_share(window: str) -> str:
    """Return the query for the share of requests that ended with an error of the deployment."""
    requests = f"dynamo_frontend_requests_total{{{MODEL}}}"
    failed = f'dynamo_frontend_requests_total{{{MODEL},status=~"5..|408|429"}}'
    return f"(sum(increase({failed}[{window}])) or vector(0)) / sum(increase({requests}[{window}]))"


def late_share(histogram: str, bound: str) -> str:
    """Return the query for the share of a histogram above a bound."""
    count = f"sum(rate({histogram}_count{{{MODEL}}}{RATE}))"
    return f'1 - sum(rate({histogram}_bucket{{{MODEL},le="{bound}"}}{RATE})) / {count}'


SLO = (
    Panel(
        "Share of failed requests", "percentunit",
        {window: failed_share(window) for window in ("5m", "1h", "6h", "3d")},
        "docs/reference/alerts.md: BudgetBurnsFast, BudgetBurns, BudgetBurnsSlow.",
    ),
    Panel(
        "Budget of 0.1 % used in 30 days", "percentunit",
        {"used": f"{failed_share('30d')} / 0.001"},
    ),
    Panel(
        "First tokens after more than 5 s", "percentunit",
        {"late": late_share("dynamo_frontend_time_to_first_token_seconds", "5.0")},
        "docs/reference/alerts.md: FirstTokenLate.",
    ),
    Panel(
        "Pauses of more than 2 s in answers", "percentunit",
        {"stalled": late_share("dynamo_frontend_inter_token_latency_seconds", "2.0")},
        "docs/reference/alerts.md: TokensStall.",
    ),
)  # fmt: skip
BOARDS: Mapping[str, tuple[str, Sequence[Panel]]] = {
    "serving": ("Dynamo: serving", SERVING),
    "workers": ("Dynamo: workers and KV", WORKERS),
    "transfers": ("Dynamo: disaggregation and tiers", TRANSFERS),
    "slo": ("Dynamo: service level", SLO),
}


def monitoring_files(maker: str) -> Mapping[str, str]:
    """Return the texts of dashboards, of the rules file and of the page of alerts, by path.
    `maker` is the line that says what has made them."""
    rules = yaml.safe_dump(prometheus_rules(RULES), sort_keys=False, width=100)
    boards = {
        f"deploy/grafana/dashboards/{name}.json": f"{json.dumps(_board(name, *board), indent=1)}\n"
        for name, board in BOARDS.items()
    }
    page = alerts_page(f"# Alerts\n\n<!-- {maker}. -->\n")
    return {RULES_FILE: f"# {maker}.\n{rules}", "docs/reference/alerts.md": page, **boards}


def alerts_page(title: str) -> str:
    """Return the page of alerts."""
    text = (
        "The supervisor of a deployment evaluates these rules every `alerts.interval` from the "
        "metrics of its processes. `dynamo doctor` and `/health` of the supervisor show the active "
        "ones; [monitor a deployment](../how-to/watch.md#alerts) says who gets them. "
        "[prometheus-rules.yml](../../deploy/prometheus-rules.yml) has the same rules for "
        "Prometheus.\n"
    )
    rows = [f"| `{r.name}` | {r.severity} | {r.felt} | {r.general_advice} |" for r in RULES]
    head = ["| alert | severity | what users notice | what to do |", "| --- | --- | --- | --- |"]
    parts = [title, text, *head, *rows]
    parts.append(
        "\n## Conditions\n\nAn alert is active when its condition has held for this time.\n"
    )
    parts += ["| alert | for | condition |", "| --- | --- | --- |"]
    for rule in RULES:
        query = rule.to_promql().replace("|", "\\|").replace("\n", " ")
        parts.append(f"| `{rule.name}` | {rule.for_s} s | `{query}` |")
    return "\n".join(parts) + "\n"


def _board(name: str, title: str, panels: Sequence[Panel]) -> Mapping[str, Any]:
    return {
        "uid": f"dynamo-{name}",
        "title": title,
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "tags": ["dynamo"],
        "links": [
            {"type": "dashboards", "title": "Dynamo", "tags": ["dynamo"], "asDropdown": True}
        ],
        "templating": {
            "list": [
                _variable("model", "dynamo_frontend_workers", "model"),
                _variable("worker", "dynamo_worker_blocks", "process"),
                {"name": "guide", "label": "URL of the folder docs", "type": "textbox"},
            ]
        },
        "annotations": {"list": []},
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _variable(name: str, metric: str, label: str) -> Mapping[str, Any]:
    """Return a variable with the values of a label; by default it is all of them."""
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": f"label_values({metric}, {label})",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel) -> Mapping[str, Any]:
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "title": panel.title,
        "description": panel.text,
        "links": [
            {"title": page, "url": f"${{guide}}/{page.removeprefix('docs/')}", "targetBlank": True}
            for page in _PAGE.findall(panel.text) or ["docs/how-to/watch.md"]
        ],
        "type": "timeseries",
        "datasource": DATASOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }
