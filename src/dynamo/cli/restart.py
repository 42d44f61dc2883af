"""`dynamo restart`: replace processes one by one while the deployment serves."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.cli.orders import add_deployment, give_order
from dynamo.cli.parsing import Parser

EXAMPLES = """\
  dynamo restart                  every worker, one after the other
  dynamo restart worker-2         this one
  dynamo restart frontend"""


def parser() -> Parser:
    """Which processes, and where."""
    made = Parser(
        "dynamo restart",
        "Replace processes one by one: the old one leaves when the new one serves, and its "
        "requests go on at others. There must be room for one more meanwhile.",
        EXAMPLES,
    )
    made.add_argument(
        "what", nargs="?", default="worker", metavar="PROCESS|KIND", help="default: worker"
    )
    add_deployment(made)
    return made


def run(arguments: Sequence[str]) -> int:
    """Restart, and wait until all are replaced."""
    found = parser().parse(arguments)
    return give_order(found, "restart", found.what)
