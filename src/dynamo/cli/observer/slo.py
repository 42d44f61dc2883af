"""`dynamo slo`: the share of requests that were answered right and in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.cli.parsing import Parser, format_table
from dynamo.cli.router import add_router_flags, make_router_client

EXAMPLES = """\
  dynamo slo
  dynamo slo --json
  dynamo run out=mock --observer.ttft_slo 1s --observer.slo_target 0.99     another promise"""

MAX_CAUSES = 5


def parser() -> Parser:
    """Return the parser: the format and the deployment."""
    parser = Parser(
        "dynamo slo",
        "Show the share of requests that were answered right and in time over 1 hour, 24 hours and "
        "30 days,\nwhat is left of the promised budget of others, and what spent it.",
        EXAMPLES,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    add_router_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Fetch and print the report."""
    args = parser().parse(arguments)
    report = make_router_client(args).slo()
    print(msgspec.json.encode(report).decode() if args.json else format_slo(report))
    return 0


def format_slo(report: Mapping[str, Any]) -> str:
    """Format a report for a terminal."""
    ttft, gap = report["ttft_slo"], report["gap_slo"]
    promise = f"are answered, begin within {ttft:g} s and never pause for more than {gap:g} s"
    lines = [f"promised: {report['target']:.6g} of all requests {promise}", ""]
    rows: list[tuple[str, ...]] = [
        ("LAST", "MODEL", "REQUESTS", "RIGHT AND IN TIME", "FAILED", "LATE", "BUDGET LEFT")
    ]
    models = report["models"]
    for window in report["windows"]:
        rows.append(_row(window, "all" if len(models) != 1 else next(iter(models))))
        if len(models) > 1:
            for model, windows in models.items():
                same = (each for each in windows if each["window"] == window["window"])
                rows += [_row(each, model) for each in same]
    lines += format_table(rows)
    spent = report["windows"][-1]["causes"]
    if spent:
        causes = [f"{cause} ({count})" for cause, count in spent.items()]
        lines += [
            "",
            f"spent in {report['windows'][-1]['window']} by: {', '.join(causes[:MAX_CAUSES])}",
        ]
        lines += ["`dynamo why` shows the requests of the last hour"]
    return "\n".join(lines)


def _row(window: Mapping[str, Any], model: str) -> tuple[str, ...]:
    failed, late, left = str(window["failed"]), str(window["late"]), window["budget_left"]
    return (
        window["window"],
        model,
        str(window["requests"]),
        _percent(window["good_ratio"], 3),
        failed,
        late,
        _percent(left, 1),
    )


def _percent(ratio: float | None, digits: int) -> str:
    return "-" if ratio is None else f"{ratio * 100:.{digits}f} %"
