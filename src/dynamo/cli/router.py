"""`dynamo router`: show how a deployment routes, in the console or as a report."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo.cli.parsing import API_KEY_VARIABLE, DEPLOYMENT_HELP, Parser
from dynamo.core.errors import ConfigError

if TYPE_CHECKING:
    from dynamo.operations.router_client import RouterClient


def add_router_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--url`, `--deployment` and `--api-key`."""
    parser.add_argument(
        "--url",
        help="URL of an observer, or of a frontend, which names its observer "
        "(default: the deployment here)",
    )
    parser.add_argument("--deployment", metavar="NAME", help=DEPLOYMENT_HELP)
    parser.add_argument("--api-key", metavar="KEY", help=f"default: ${API_KEY_VARIABLE}")


def make_router_client(args: argparse.Namespace) -> RouterClient:
    """Return a client of the chosen deployment. Raises `ConfigError` and `NotFound`."""
    from dynamo.cli.stop import find_server_url
    from dynamo.operations.router_client import RouterClient

    url = _parse_url(args.url) if args.url else find_server_url(args.deployment, ("observer",))
    return RouterClient(url, args.api_key or os.environ.get(API_KEY_VARIABLE, ""))


def _parse_url(text: str) -> str:
    from dynamo_client.config import parse_base_url

    try:
        parse_base_url(text)
    except ValueError:
        hint = "such as http://127.0.0.1:8000"
        raise ConfigError(f"--url: {text!r} is not a URL", hint=hint) from None
    return text if "://" in text else f"http://{text}"


EXAMPLES = """\
  dynamo router view                        opens the console's page of workers
  dynamo router view --json --seconds 60
  dynamo router report --seconds 300
  dynamo router report --json --url http://127.0.0.1:8001"""


def parser() -> Parser:
    """Return the parser: view or report, the output and the deployment."""
    parser = Parser(
        "dynamo router",
        "view: cache and load of every worker over time, in the console or as JSON.\n"
        "report: reachable and achieved cache hits, latencies, balance and advice.",
        EXAMPLES,
        usage="{view,report} [FLAGS]",
    )
    parser.add_argument(
        "what", choices=("view", "report"), metavar="view|report", help="what to show"
    )
    parser.add_argument("--seconds", type=float, metavar="N", help="only the last N seconds")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    add_router_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Open the view or print the report."""
    args = parser().parse(arguments)
    if args.what == "report":
        return _print_report(args)
    client = make_router_client(args)
    timeline = client.timeline(args.seconds)  # by now, the client knows the observer
    if args.json:
        print(msgspec.json.encode(timeline).decode())
        return 0
    return open_page(client.url, "#workers")


def open_page(observer_url: str, page: str = "", *, opens: bool = True) -> int:
    """Print the URL of a page of the console, and open it where there is a browser."""
    import webbrowser

    from dynamo.application.console.handler import CONSOLE_PATH

    url = f"{observer_url}{CONSOLE_PATH}{page}"
    print(url, flush=True)
    if opens and not webbrowser.open(url):
        print("no browser is found here: open it in one")
    return 0


def _print_report(args: argparse.Namespace) -> int:
    report = make_router_client(args).report(args.seconds)
    print(msgspec.json.encode(report).decode() if args.json else format_report(report))
    return 0


def format_report(report: Mapping[str, Any]) -> str:
    """Format a report for a terminal."""
    metrics = report["aggregated_metrics"]
    latency, flow, cache, balance = (
        metrics[name] for name in ("latency", "throughput", "cache_hit", "load_balance")
    )
    if not flow["requests"]:
        return "no request was routed in that time"
    ttft = (f"{name} {latency[f'ttft_ms_{name}']:.1f}" for name in ("mean", "p50", "p99"))
    decision = (f"{name} {latency[f'decision_ms_{name}']:.2f}" for name in ("mean", "p50", "p99"))
    failed = f"{flow['failed_ratio']:.1%} failed"
    idle = f"{balance['workers_idle']:g} of {balance['workers']:g} workers idle"
    lines = [
        f"requests     {flow['requests']:g}, {flow['requests_per_s']:.2f} per second, {failed}",
        f"first token  {', '.join(ttft)} ms",
        f"decision     {', '.join(decision)} ms",
        f"prompts      {_format_cache_shares(cache)}",
        f"balance      busiest over mean {balance['imbalance']:.2f}, {idle}",
    ]
    lines += [
        f"trend        {name} {trend['direction']}, {trend['before']:.4g} -> {trend['after']:.4g}"
        for name, trend in report["trends"].items()
        if trend["direction"] != "steady"
    ]
    lines += [f"bottleneck   {bottleneck['evidence']}" for bottleneck in report["bottlenecks"]]
    lines += [f"alert        {alert['message']}" for alert in report["alerts"]]
    lines += [f"advice       {advice}" for advice in report["recommendations"]]
    return "\n".join(lines)


def _format_cache_shares(cache: Mapping[str, float]) -> str:
    labels = (
        ("seen", "seen in earlier prompts"),
        ("reachable", "cached on some worker"),
        ("hit", "cached on the chosen worker"),
        ("achieved", "reused by engines"),
    )
    return ", ".join(f"{cache[key]:.1%} {label}" for key, label in labels if key in cache)
