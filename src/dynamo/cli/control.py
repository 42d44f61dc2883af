"""What `dynamo scale`, `drain` and `restart` share: which deployment, and an order to it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Literal

from dynamo.cli.parsing import Parser
from dynamo.core.errors import ConfigError, DeadlineExceeded

DEFAULT_TIMEOUT_S = 120.0


def add_deployment_flags(parser: Parser) -> None:
    """The flags of all three."""
    parser.add_argument(
        "--deployment", metavar="NAME|PORT", help="which one, where several run (see `dynamo ps`)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help=f"stop waiting after (default: {DEFAULT_TIMEOUT_S:g}); the order is carried out all the same",
    )


def send_control_request(
    found: argparse.Namespace, do: Literal["scale", "drain", "restart"], name: str, count: int = 0
) -> int:
    """Give it, and print what the deployment says until it is done."""
    from dynamo.cli.stop import select_deployments
    from dynamo.runtime.deployment import live_deployments
    from dynamo.runtime.processes.control import ControlRequest, send_control_request

    (deployment,) = select_deployments(live_deployments(), found.deployment)
    try:
        for said in send_control_request(
            ControlRequest(do, name, count), deployment.folder, found.timeout
        ):
            print(said, flush=True)
    except TimeoutError:
        raise DeadlineExceeded(
            f"{deployment.id} is not done after {found.timeout:g} s",
            hint="it goes on by itself; `dynamo ps` shows how it stands",
        ) from None
    return 0


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
