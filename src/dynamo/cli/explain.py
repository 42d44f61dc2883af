"""`dynamo explain`: explain why a request was routed to its worker."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.cli.parsing import Parser, format_table
from dynamo.cli.router import add_router_flags, make_router_client

EXAMPLES = """\
  dynamo explain                                 the last decisions
  dynamo explain 1f0c2a9d5e6b7c8d00000001        by the answer's x-request-id
  dynamo explain my-own-id --json"""


def parser() -> Parser:
    """Return the parser: the request id and the deployment."""
    parser = Parser(
        "dynamo explain",
        "Explain the routing of a request: the candidates with every term of their cost, and the\n"
        "outcome. The deployment must run with --router-mode kv.",
        EXAMPLES,
    )
    parser.add_argument("request_id", nargs="?", default="", help="default: the last decisions")
    parser.add_argument("--json", action="store_true", help="print the server's JSON")
    add_router_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Fetch and print decisions."""
    args = parser().parse(arguments)
    decisions = make_router_client(args).explain(args.request_id)
    if args.json:
        print(msgspec.json.encode(decisions).decode())
    elif args.request_id:
        print("\n\n".join(map(format_decision, decisions)))
    else:
        print(format_decision_list(decisions) if decisions else "no request was routed yet")
    return 0


def format_decision(decision: Mapping[str, Any]) -> str:
    """Format a decision with its outcome and costs."""
    choice = f" choice {decision['choice']}" if decision["choice"] else ""
    request = f"{decision['request_id']}{choice}, model {decision['model']}"
    lines = [
        f"request  {request}, {_clock_time(decision)}, by {decision['router']}",
        f"mode     {decision['mode']}" + (f", view {decision['view']}" if decision["view"] else ""),
        f"why      {decision['why']}",
        f"outcome  {_format_outcome(decision)}",
    ]
    if (weight := decision.get("harm_weight")) is not None:
        target = f"target {decision['itl_slo_ms']:g} ms between tokens"
        lines.append(f"harm     weight {weight:.4g}, {target}")
    if decision["costs"]:
        lines += ["", *_format_cost_table(decision)]
    return "\n".join(lines)


def format_decision_list(decisions: Sequence[Mapping[str, Any]]) -> str:
    """Format each decision as a line."""
    return "\n".join(
        f"{_clock_time(decision)}  {decision['request_id']}  {decision['why']}"
        for decision in decisions
    )


def _clock_time(decision: Mapping[str, Any]) -> str:
    return time.strftime("%H:%M:%S", time.localtime(decision["at"]))


def _format_outcome(decision: Mapping[str, Any]) -> str:
    outcome = decision["outcome"]
    if outcome is None:
        return "in flight"
    parts = []
    if outcome["ttft_s"] is not None:
        predicted = decision["predicted_ttft_ms"]
        prediction = f" (predicted {predicted:.1f})" if predicted is not None else ""
        parts.append(f"first token after {outcome['ttft_s'] * 1e3:.1f} ms{prediction}")
        parts.append(f"{outcome['output_tokens']} tokens in {outcome['duration_s'] * 1e3:.1f} ms")
        parts.append(
            f"{outcome['cached_tokens']} of {outcome['prompt_tokens']} prompt tokens from the cache"
        )
    if outcome.get("error"):
        parts.append(f"ended with {outcome['error']}")
    return ", ".join(parts)


def _format_cost_table(decision: Mapping[str, Any]) -> list[str]:
    terms = list(decision["costs"][0]["terms"])
    rows = [("", "WORKER", "BLOCKS HELD", "COST", *(term.upper() for term in terms))]
    for row in decision["costs"]:
        chosen = "->" if row["worker"] == (decision["prefill"] or decision["worker"]) else ""
        values = (f"{row['terms'].get(term, 0.0):.2f}" for term in terms)
        name = f"{row['worker']} > {pair}" if (pair := row["decode_worker"]) else row["worker"]
        rows.append((chosen, name, _format_blocks(row), f"{row['cost']:.2f}", *values))
    lines = format_table(rows)
    more = decision["candidates"] - len(decision["costs"])
    return [*lines, f"   and {more} more with no lower cost"] if more > 0 else lines


def _format_blocks(row: Mapping[str, Any]) -> str:
    """Return the blocks on the device, and those that would be loaded from each tier."""
    tiers: Mapping[str, int] = row.get("tier_blocks") or {}
    device = row["overlap_blocks"] - sum(tiers.values())
    return " + ".join([str(device), *(f"{count} {tier}" for tier, count in tiers.items())])
