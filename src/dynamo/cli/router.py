"""`dynamo router`: how a deployment routes, as a picture and as a report."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo.cli.parsing import Parser, check_writable
from dynamo.core.errors import ConfigError, NotFound

if TYPE_CHECKING:
    from dynamo.operations.router_client import RouterClient

API_KEY_VARIABLE = "DYNAMO_API_KEY"


def add_router_flags(made: argparse.ArgumentParser) -> None:
    """`--url`, `--deployment`, `--api-key`."""
    made.add_argument("--url", help="HTTP port of a frontend or a router; else what runs here")
    made.add_argument("--deployment", metavar="NAME", help="its name or port, where several run")
    made.add_argument("--api-key", metavar="KEY", help=f"default: ${API_KEY_VARIABLE}")


def make_router_client(found: argparse.Namespace) -> RouterClient:
    """Raises `ConfigError`, `NotFound`."""
    from dynamo.operations.router_client import RouterClient

    url = _parse_url(found.url) if found.url else _deployment_url(found.deployment)
    return RouterClient(url, found.api_key or os.environ.get(API_KEY_VARIABLE, ""))


def _parse_url(text: str) -> str:
    from dynamo_client.config import parse_base_url

    try:
        parse_base_url(text)
    except ValueError:
        hint = "such as http://127.0.0.1:8000"
        raise ConfigError(f"--url: {text!r} is no URL", hint=hint) from None
    return text if "://" in text else f"http://{text}"


def _deployment_url(which: str | None) -> str:
    from dynamo.cli.stop import select_deployments
    from dynamo.runtime.deployment import live_deployments

    (deployment,) = select_deployments(live_deployments(), which)
    for process in deployment.live_processes():
        if process.role in {"frontend", "router"} and process.address.startswith("http"):
            return process.address
    raise NotFound(f"{deployment.id} speaks no HTTP", hint="--url says where another one is")


DEFAULT_HTML_FILE = "router.html"

EXAMPLES = """\
  dynamo router view                        writes router.html
  dynamo router view --picture router.png
  dynamo router report --seconds 300
  dynamo router report --json --url http://127.0.0.1:8001"""


def parser() -> Parser:
    """What to show, and where to ask."""
    made = Parser(
        "dynamo router",
        "view: cache and load of every worker over time, as a page and a picture.\n"
        "report: hits that were reachable and achieved, latencies, balance, what to do.\n"
        "Both need a deployment that runs with --router-mode kv (or adaptive).",
        EXAMPLES,
        usage="{view,report} [FLAGS]",
    )
    made.add_argument(
        "what", choices=("view", "report"), metavar="view|report", help="what to show"
    )
    made.add_argument(
        "--html", metavar="FILE", help=f"view: the page (default: {DEFAULT_HTML_FILE})"
    )
    made.add_argument("--picture", metavar="FILE.png", help="view: a PNG file")
    made.add_argument("--seconds", type=float, metavar="N", help="only the last N")
    made.add_argument("--json", action="store_true", help="print data instead")
    add_router_flags(made)
    return made


def run(arguments: Sequence[str]) -> int:
    """Fetch, then print or write."""
    found = parser().parse(arguments)
    return _write_view(found) if found.what == "view" else _print_report(found)


def _print_report(found: argparse.Namespace) -> int:
    report = make_router_client(found).report(found.seconds)
    print(msgspec.json.encode(report).decode() if found.json else format_report(report))
    return 0


def _write_view(found: argparse.Namespace) -> int:
    from dynamo.application.routing import render_page
    from dynamo.operations.router_plot import draw_router_samples

    check_writable(found.html, found.picture)
    port = make_router_client(found)
    samples = port.samples()
    if found.seconds is not None and samples:
        samples = [one for one in samples if one["at"] >= samples[-1]["at"] - found.seconds]
    if found.json:
        print(msgspec.json.encode(samples).decode())
        return 0
    if found.picture:
        draw_router_samples(samples, found.picture)
        print(f"wrote {found.picture}")
    if found.html or not found.picture:
        path = found.html or DEFAULT_HTML_FILE
        data = msgspec.json.encode({"samples": samples, "report": port.report(found.seconds)})
        Path(path).write_bytes(render_page(data, live=False))
        print(f"wrote {path}")
    return 0


def format_report(report: Mapping[str, Any]) -> str:
    """A report for people."""
    metrics = report["aggregated_metrics"]
    latency, flow, cache, balance = (
        metrics[name] for name in ("latency", "throughput", "cache_hit", "load_balance")
    )
    if not flow["requests"]:
        return "no request was routed in that time"
    first = (f"{name} {latency[f'ttft_ms_{name}']:.1f}" for name in ("mean", "p50", "p99"))
    held = (f"{name} {latency[f'decision_ms_{name}']:.2f}" for name in ("mean", "p50", "p99"))
    failed = f"{flow['failed_ratio']:.1%} failed"
    idle = f"{balance['workers_idle']:g} of {balance['workers']:g} workers idle"
    lines = [
        f"requests     {flow['requests']:g}, {flow['requests_per_s']:.2f} a second, {failed}",
        f"first token  {', '.join(first)} ms",
        f"held         {', '.join(held)} ms",
        f"prompts      {_format_cache_shares(cache)}",
        f"balance      busiest over mean {balance['imbalance']:.2f}, {idle}",
    ]
    lines += [
        f"trend        {name} {one['direction']}, {one['before']:.4g} -> {one['after']:.4g}"
        for name, one in report["trends"].items()
        if one["direction"] != "steady"
    ]
    lines += [f"bottleneck   {one['evidence']}" for one in report["bottlenecks"]]
    lines += [f"alert        {one['message']}" for one in report["alerts"]]
    lines += [f"advice       {one}" for one in report["recommendations"]]
    return "\n".join(lines)


def _format_cache_shares(cache: Mapping[str, float]) -> str:
    named = (
        ("seen", "asked for before"),
        ("reachable", "held by some worker"),
        ("hit", "by the chosen one"),
        ("achieved", "found by engines"),
    )
    return ", ".join(f"{cache[key]:.1%} {about}" for key, about in named if key in cache)
