"""`dynamo restart`: replace processes one by one while the deployment serves."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.cli.orders import add_deployment_flags, send_control_request
from dynamo.cli.parsing import Parser

RESTART_EXAMPLES = """\
  dynamo restart                  every worker, one after the other
  dynamo restart worker-2         this one
  dynamo restart frontend"""


def restart_parser() -> Parser:
    """Which processes, and where."""
    made = Parser(
        "dynamo restart",
        "Replace processes one by one: the old one leaves when the new one serves, and its "
        "requests go on at others. There must be room for one more meanwhile.",
        RESTART_EXAMPLES,
    )
    made.add_argument(
        "what", nargs="?", default="worker", metavar="PROCESS|KIND", help="default: worker"
    )
    add_deployment_flags(made)
    return made


def run_restart(arguments: Sequence[str]) -> int:
    """Restart, and wait until all are replaced."""
    found = restart_parser().parse(arguments)
    return send_control_request(found, "restart", found.what)
