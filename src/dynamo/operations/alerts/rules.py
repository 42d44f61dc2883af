"""The table of alerts. Supervisors evaluate it, and Prometheus' rules and the documentation are
made from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynamo.operations.alerts.conditions import AlertCondition, AlertRule, Series
from dynamo.scheduling.router.collector.report import ALERT_RULES

FIRST_TOKEN_PROMISE_S = 5
"""A first token that comes later is late. Histograms have a bucket of this bound."""
GAP_PROMISE_S = 2
"""A longer time between two texts of an answer is a stall. Histograms have this bound, too."""
ERROR_BUDGET = 0.001
"""The share of requests that may end with an error of the deployment."""
FAILED = {"status": "5..|408|429"}
WINDOW_S = 60
ANY: Mapping[str, str] = {}
WORKERS = {"child_role": "worker"}

HOUR_S = 3600
DAY_S = 24 * HOUR_S


def _growth(metric: str, window_s: int = WINDOW_S, where: Mapping[str, str] = ANY) -> Series:
    return Series(metric, where, window_s)


def _happened(
    metric: str, more_than: float = 0.0, where: Mapping[str, str] = ANY
) -> tuple[AlertCondition]:
    """Return the condition that a counter grew by more than this within a minute."""
    return (AlertCondition(_growth(metric, where=where), more_than),)


def _late(histogram: str, bound_s: int, share: float, least: float) -> tuple[AlertCondition]:
    """Return the condition that more than `share` of a histogram is above a bound."""
    count = _growth(f"{histogram}_count")
    on_time = _growth(f"{histogram}_bucket", where={"le": str(float(bound_s))})
    return (AlertCondition(count, share, minus=on_time, over=count, least=least),)


def _burns(rate: float, *windows_s: int, least: float = 10) -> tuple[AlertCondition, ...]:
    """Return the condition that the budget of errors burns at `rate` over both windows."""
    requests = "dynamo_frontend_requests_total"
    return tuple(
        AlertCondition(
            _growth(requests, window_s, FAILED),
            rate * ERROR_BUDGET,
            over=_growth(requests, window_s),
            least=least,
        )
        for window_s in windows_s
    )


def _below_one(gauge: str) -> tuple[AlertCondition]:
    return (AlertCondition(Series(gauge, combine="min"), 1, below=True),)


def _above_zero(gauge: str, where: Mapping[str, str] = ANY) -> tuple[AlertCondition]:
    return (AlertCondition(Series(gauge, where, combine="max"), 0),)


DEPLOYMENT_RULES: Sequence[AlertRule] = (
    AlertRule(
        "WorkerLost",
        "ticket",
        _happened("dynamo_supervisor_restarts_total", where=WORKERS),
        "Requests of that worker moved to others and wait longer while it starts again.",
        "Read the last log lines of the worker: `dynamo ps` says how it ended.",
        by=("name",),
    ),
    AlertRule(
        "WorkerFlapping",
        "page",
        (AlertCondition(_growth("dynamo_supervisor_restarts_total", 300, WORKERS), 2.5),),
        "Requests are moved again and again; capacity is short.",
        "The worker dies soon after each start. Read its log lines before the death; if the system "
        "killed it for memory, lower `--num-blocks`.",
        by=("name",),
    ),
    AlertRule(
        "WorkerHung",
        "page",
        _happened("dynamo_supervisor_hung_total"),
        "Answers of that process stopped for seconds, then moved or failed.",
        "Its log has the stacks from before it was killed: move long computations off the event "
        "loop. A process that a signal stopped has no stacks.",
        by=("name",),
    ),
    AlertRule(
        "WorkerUnreachable",
        "page",
        _above_zero("dynamo_frontend_unusable_workers"),
        "Fewer workers share the load than `dynamo ps` lists.",
        "`/health` of the frontend names the workers and why: another security.secret, another "
        "model or block size, or an address that is out of reach.",
        by=("reason",),
        for_s=10,
    ),
    AlertRule(
        "NoWorkers",
        "page",
        (
            AlertCondition(Series("dynamo_frontend_workers", combine="max"), 1, below=True),
            AlertCondition(
                Series("dynamo_model_state", {"state": "unloaded|sleeping"}, combine="max"),
                1,
                below=True,
            ),
        ),
        "Every request for the model is refused with 503.",
        "`dynamo ps` shows whether its workers start, die or hang.",
        by=("model",),
        for_s=15,
    ),
    AlertRule(
        "CapacityShort",
        "page",
        (
            AlertCondition(
                _growth("dynamo_admission_rejected_total"),
                0.01,
                over=_growth("dynamo_frontend_requests_total"),
                least=5,
            ),
        ),
        "Requests are rejected with 503 and Retry-After.",
        "Add workers (`dynamo scale`). The limits are {router.max_queue_wait}, "
        "{router.ttft_slo} and {router.queue_bound}.",
        for_s=10,
    ),
    AlertRule(
        "FirstTokenLate",
        "page",
        _late("dynamo_frontend_time_to_first_token_seconds", FIRST_TOKEN_PROMISE_S, 0.05, 5),
        f"Answers begin after more than {FIRST_TOKEN_PROMISE_S} s.",
        "Compare waiting requests and prompt tokens of the workers: add workers, or shorten "
        "prompts.",
        for_s=10,
        advice_where={
            "router.mode=round_robin": "Mode least_loaded or kv evens queues out.",
            "router.ttft_slo=0.0": "router.ttft_slo rejects requests that would be late.",
        },
    ),
    AlertRule(
        "TokensStall",
        "page",
        _late("dynamo_frontend_inter_token_latency_seconds", GAP_PROMISE_S, 0.001, 5),
        f"Answers pause for more than {GAP_PROMISE_S} s.",
        "Look for preemptions, long prompts beside answers (disaggregation helps), and stalls.",
        for_s=10,
    ),
    AlertRule(
        "BudgetBurnsFast",
        "page",
        _burns(14.4, HOUR_S, 300),
        "More than 1 in 70 requests fail; a month's budget of errors lasts two days.",
        "Which status grows? 503: capacity or no workers; 500, 502, 504: workers fail.",
    ),
    AlertRule(
        "BudgetBurns",
        "page",
        _burns(6, 6 * HOUR_S, 1800),
        "More than 6 in 1,000 requests fail; a month's budget of errors lasts five days.",
        "Which status grows? 503: capacity or no workers; 500, 502, 504: workers fail.",
    ),
    AlertRule(
        "BudgetBurnsSlow",
        "ticket",
        _burns(1, 3 * DAY_S, 6 * HOUR_S),
        "The month's budget of errors will be used up before its end.",
        "Look for what fails regularly: deploys, peaks, one worker.",
    ),
    AlertRule(
        "CacheThrashing",
        "ticket",
        (
            AlertCondition(
                _growth("dynamo_router_seen_blocks_total", 120),
                0.3,
                minus=_growth("dynamo_router_reachable_blocks_total", 120),
                over=_growth("dynamo_router_prompt_blocks_total", 120),
                least=1000,
            ),
        ),
        "First tokens take longer: prompts are computed again that were in a cache before.",
        "Give workers more KV memory or a tier below it (`--kv-host-size`).",
    ),
    AlertRule(
        "EventsLost",
        "ticket",
        _happened("dynamo_kv_index_events_lost_total"),
        "The router places requests by an old view of caches.",
        "Is the event plane overloaded, or a worker's event loop? See PlaneAway and LoopStalls.",
    ),
    AlertRule(
        "PlaneAway",
        "page",
        _below_one("dynamo_plane_up_ratio"),
        "Running requests go on; new workers and changes are not seen.",
        "Start the plane's server again, or mend the network; processes connect by themselves.",
        by=("plane",),
        for_s=5,
    ),
    AlertRule(
        "TransferFailing",
        "ticket",
        _happened("dynamo_worker_prefill_fallbacks_total", 2.5),
        "Prompts are computed twice; first tokens of disaggregated requests are late.",
        "`dynamo doctor` says which workers cannot pull KV blocks of each other, and why.",
        by=("reason",),
    ),
    AlertRule(
        "TierFailing",
        "ticket",
        _below_one("dynamo_worker_tier_up_ratio"),
        "Nothing fails; prompts are computed that a tier would have held.",
        "`/health` of the worker has the reason under `limitations`: a full disk or volume, or a "
        "store that refuses.",
        by=("process", "tier"),
        for_s=5,
    ),
    AlertRule(
        "LoopStalls",
        "ticket",
        _happened("dynamo_loop_stalls_total", 20),
        "All answers of that process pause at once.",
        "Its log names the line that held the event loop. Too few cores have the same effect.",
        by=("process",),
    ),
    AlertRule(
        "DiskFull",
        "page",
        _above_zero("dynamo_supervisor_disk_full_ratio"),
        "Nothing yet; no process or model can be added.",
        "Free space on the disk of the state folder.",
    ),
    AlertRule(
        "FilesNearLimit",
        "ticket",
        (
            AlertCondition(
                Series("process_open_fds", combine="max"),
                0.85,
                over=Series("process_max_fds", combine="max"),
            ),
        ),
        "Nothing yet; soon connections are refused.",
        "Raise the hard limit of open files (`ulimit -Hn`, LimitNOFILE).",
        by=("process",),
        for_s=5,
    ),
    AlertRule(
        "VersionsDiffer",
        "ticket",
        (AlertCondition(Series("dynamo_build_info", combine="distinct", label="version"), 1),),
        "Mostly nothing; features of the newer version may be off.",
        "Restart what has the older version: `dynamo ps` and `/health` show it.",
        for_s=30,
    ),
)

ROUTING_RULES: Sequence[AlertRule] = tuple(
    AlertRule(
        name,
        "ticket",
        _above_zero("dynamo_router_alert_ratio", {"alert": name}),
        f"Routing could be better. The limit: {rule.evidence.format(rule.threshold)}.",
        rule.advice,
        advice_where=rule.advice_where,
    )
    for name, rule in ALERT_RULES.items()
)

RULES: Sequence[AlertRule] = (*DEPLOYMENT_RULES, *ROUTING_RULES)
