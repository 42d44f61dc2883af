"""`dynamo scale`: more or fewer processes of one kind while the deployment serves."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.cli.orders import add_deployment_flags, send_control_request
from dynamo.cli.parsing import Parser
from dynamo.core.errors import ConfigError

SCALE_EXAMPLES = """\
  dynamo scale worker=5
  dynamo scale worker=2 --deployment 8000     the one on this port"""


def scale_parser() -> Parser:
    """What to scale, and where."""
    made = Parser(
        "dynamo scale",
        "Run so many processes of one kind. New ones serve before this returns; who leaves hands "
        "its requests to the others.",
        SCALE_EXAMPLES,
    )
    made.add_argument("what", metavar="KIND=COUNT", help="e.g. worker=5")
    add_deployment_flags(made)
    return made


def run_scale(arguments: Sequence[str]) -> int:
    """Scale, and wait until it is so."""
    found = scale_parser().parse(arguments)
    kind, _, count = found.what.partition("=")
    if not (kind and count.isdecimal()):
        raise ConfigError(f"{found.what!r} is no KIND=COUNT", hint="e.g. dynamo scale worker=5")
    return send_control_request(found, "scale", kind, int(count))
