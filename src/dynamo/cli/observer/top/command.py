"""`dynamo top`: show what a deployment does now."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from dynamo.cli.parsing import Parser
from dynamo.cli.router import add_router_flags, make_router_client

if TYPE_CHECKING:
    from dynamo.cli.observer.top.state import TopReader, TopState

EXAMPLES = """\
  dynamo top
  dynamo top --once
  dynamo top --json --url http://127.0.0.1:8001"""

DEFAULT_INTERVAL_S = 1.0
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 3600
WIDE = 200


def parser() -> Parser:
    """Return the parser: the form and the deployment."""
    parser = Parser(
        "dynamo top",
        "Show the workers of a deployment, their load and cache, the pace of answers, slow\n"
        "requests and alerts, once a second. ? shows the keys.",
        EXAMPLES,
    )
    parser.add_argument("--once", action="store_true", help="print one frame; without a terminal")
    parser.add_argument("--json", action="store_true", help="print JSON once instead")
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=DEFAULT_INTERVAL_S,
        metavar="SECONDS",
        help="default: 1",
    )
    add_router_flags(parser)
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not MIN_INTERVAL_S <= value <= MAX_INTERVAL_S:
        raise argparse.ArgumentTypeError(
            f"{text} is not within {MIN_INTERVAL_S} and {MAX_INTERVAL_S} seconds"
        )
    return value


def run(arguments: Sequence[str]) -> int:
    """Show the deployment until the user leaves, or once."""
    from dynamo.cli.observer.top.state import TopReader
    from dynamo.cli.stop import select_deployments
    from dynamo.runtime.deployment import live_deployments

    args = parser().parse(arguments)
    client = make_router_client(args)
    deployment = None
    if not args.url:
        (deployment,) = select_deployments(live_deployments(), args.deployment)
    reader = TopReader(client, deployment)
    if args.json:
        print(msgspec.json.encode(_read(reader)).decode())
        return 0
    if args.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        print(format_once(_read(reader)))
        return 0
    try:
        from dynamo.cli.observer.top.screen import TopScreen
    except ImportError:  # a Python without curses
        return _repeat(reader, args.interval)
    if os.environ.get("TERM", "dumb") == "dumb":
        return _repeat(reader, args.interval)
    TopScreen(reader, args.interval).run()
    return 0


def _read(reader: TopReader) -> TopState:
    """Return the present state. Raises what keeps it from being read."""
    from dynamo.core.errors import DynamoError

    state = reader.read()
    if state.reason:
        raise DynamoError(state.reason)
    return state


def _repeat(reader: TopReader, interval_s: float) -> int:
    with suppress(KeyboardInterrupt):
        while True:
            print(format_once(_read(reader)), flush=True)
            time.sleep(interval_s)
    return 0


def format_once(state: TopState) -> str:
    """Return a frame with every worker, without the line of keys."""
    from dynamo.cli.observer.top.frame import View, make_frame

    width = shutil.get_terminal_size((WIDE, 0)).columns
    height = 20 + len(state.workers) + len(state.slow)
    view = View(cursor=-1)
    lines = [line.text.rstrip() for line in make_frame(state, view, width, height)[:-1]]
    while lines and not lines[-1]:
        lines.pop()
    return "\n".join(lines)
