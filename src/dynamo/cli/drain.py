"""`dynamo drain`: take one process out of service for good."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.cli.orders import add_deployment_flags, send_control_request
from dynamo.cli.parsing import Parser

DRAIN_EXAMPLES = """\
  dynamo drain worker-2"""


def drain_parser() -> Parser:
    """Which process, and where."""
    made = Parser(
        "dynamo drain",
        "Take one process out of service: it gets no new requests, those it has go on at others "
        "(the last one finishes its own), and it is not started again.",
        DRAIN_EXAMPLES,
    )
    made.add_argument("name", metavar="PROCESS", help="its name, as `dynamo ps` shows it")
    add_deployment_flags(made)
    return made


def run_drain(arguments: Sequence[str]) -> int:
    """Drain, and wait until it has left."""
    found = drain_parser().parse(arguments)
    return send_control_request(found, "drain", found.name)
