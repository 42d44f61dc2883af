"""`dynamo drain`: take one process out of service for good."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.cli.orders import add_deployment, give_order
from dynamo.cli.parsing import Parser

EXAMPLES = """\
  dynamo drain worker-2"""


def parser() -> Parser:
    """Which process, and where."""
    made = Parser(
        "dynamo drain",
        "Take one process out of service: it gets no new requests, those it has go on at others "
        "(the last one finishes its own), and it is not started again.",
        EXAMPLES,
    )
    made.add_argument("name", metavar="PROCESS", help="its name, as `dynamo ps` shows it")
    add_deployment(made)
    return made


def run(arguments: Sequence[str]) -> int:
    """Drain, and wait until it has left."""
    found = parser().parse(arguments)
    return give_order(found, "drain", found.name)
