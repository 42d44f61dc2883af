"""`dynamo explain`: why a request went to the worker that answered it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.cli.parsing import Parser
from dynamo.cli.router import add_router_flags, make_router_client

EXAMPLES = """\
  dynamo explain                                 the last decisions
  dynamo explain 1f0c2a9d5e6b7c8d00000001        by the answer's x-request-id
  dynamo explain my-own-id --json"""


def parser() -> Parser:
    """The request's id, and where to ask."""
    made = Parser(
        "dynamo explain",
        "Why did a request go to that worker? The table of candidates with every term of the\n"
        "cost, and what came of it. Needs a deployment that runs with --router-mode kv.",
        EXAMPLES,
    )
    made.add_argument("request_id", nargs="?", default="", help="default: the last decisions")
    made.add_argument("--json", action="store_true", help="as the server tells it")
    add_router_flags(made)
    return made


def run(arguments: Sequence[str]) -> int:
    """Print what is known."""
    found = parser().parse(arguments)
    decisions = make_router_client(found).explain(found.request_id)
    if found.json:
        print(msgspec.json.encode(decisions).decode())
    elif found.request_id:
        print("\n\n".join(format_decision(one) for one in decisions))
    else:
        print(format_decision_list(decisions) if decisions else "no request was routed yet")
    return 0


def format_decision(one: Mapping[str, Any]) -> str:
    """One decision in full."""
    choice = f" choice {one['choice']}" if one["choice"] else ""
    at = time.strftime("%H:%M:%S", time.localtime(one["at"]))
    lines = [
        f"request  {one['request_id']}{choice}, model {one['model']}, {at}, by {one['router']}",
        f"mode     {one['mode']}" + (f", view {one['view']}" if one["view"] else ""),
        f"why      {one['why']}",
        f"outcome  {_format_outcome(one)}",
    ]
    if one["costs"]:
        lines += ["", *_format_cost_table(one)]
    return "\n".join(lines)


def format_decision_list(decisions: Sequence[Mapping[str, Any]]) -> str:
    """A line a decision."""
    return "\n".join(
        f"{time.strftime('%H:%M:%S', time.localtime(one['at']))}  {one['request_id']}  {one['why']}"
        for one in decisions
    )


def _format_outcome(one: Mapping[str, Any]) -> str:
    outcome = one["outcome"]
    if outcome is None:
        return "still being answered"
    parts = []
    if outcome["ttft_s"] is not None:
        predicted = one["predicted_ttft_ms"]
        about = f" (predicted {predicted:.1f})" if predicted is not None else ""
        parts.append(f"first token after {outcome['ttft_s'] * 1e3:.1f} ms{about}")
        parts.append(f"{outcome['output_tokens']} tokens in {outcome['duration_s'] * 1e3:.1f} ms")
        parts.append(
            f"{outcome['cached_tokens']} of {outcome['prompt_tokens']} prompt tokens from the cache"
        )
    if outcome.get("error"):
        parts.append(f"ended with {outcome['error']}")
    return ", ".join(parts)


def _format_cost_table(one: Mapping[str, Any]) -> list[str]:
    from dynamo.cli.serve import format_table

    terms = list(one["costs"][0]["terms"])
    rows = [("", "WORKER", "BLOCKS HELD", "COST", *(term.upper() for term in terms))]
    for row in one["costs"]:
        chosen = "->" if row["worker"] == one["worker"] else ""
        values = (f"{row['terms'].get(term, 0.0):.2f}" for term in terms)
        rows.append(
            (chosen, row["worker"], str(row["overlap_blocks"]), f"{row['cost']:.2f}", *values)
        )
    lines = format_table(rows)
    more = one["candidates"] - len(one["costs"])
    return [*lines, f"   and {more} more that cost no less"] if more > 0 else lines
