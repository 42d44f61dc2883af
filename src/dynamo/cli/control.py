"""`dynamo scale`, `dynamo drain` and `dynamo restart`: control requests to a deployment."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Literal

from dynamo.cli.parsing import Parser
from dynamo.core.errors import ConfigError, DeadlineExceeded

DEFAULT_TIMEOUT_S = 120.0


def add_deployment_flags(parser: Parser) -> None:
    """Add the flags that all control commands have."""
    parser.add_argument(
        "--deployment", metavar="NAME|PORT", help="deployment, if several run (see `dynamo ps`)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help=f"wait so long (default: {DEFAULT_TIMEOUT_S:g}); the deployment completes the request "
        "even after a timeout",
    )


def send_control_request(
    args: argparse.Namespace, do: Literal["scale", "drain", "restart"], name: str, count: int = 0
) -> int:
    """Send a control request and print the deployment's messages until it is done."""
    from dynamo.cli.stop import select_deployments
    from dynamo.runtime.deployment import live_deployments
    from dynamo.runtime.processes.control import ControlRequest, send_control_request

    (deployment,) = select_deployments(live_deployments(), args.deployment)
    try:
        request = ControlRequest(do, name, count)
        for message in send_control_request(request, deployment.folder, args.timeout):
            print(message, flush=True)
    except TimeoutError:
        raise DeadlineExceeded(
            f"{deployment.id} is not done after {args.timeout:g} s",
            hint="the deployment continues; `dynamo ps` shows its state",
        ) from None
    return 0


SCALE_EXAMPLES = """\
  dynamo scale worker=5
  dynamo scale worker=2 --deployment 8000     the deployment on this port"""


def scale_parser() -> Parser:
    """Return the parser of `dynamo scale`."""
    parser = Parser(
        "dynamo scale",
        "Set the number of processes of one kind. The command returns when new processes serve. "
        "Requests of stopped processes move to the others.",
        SCALE_EXAMPLES,
    )
    parser.add_argument("what", metavar="KIND=COUNT", help="e.g. worker=5")
    add_deployment_flags(parser)
    return parser


def run_scale(arguments: Sequence[str]) -> int:
    """Scale a kind of process and wait until the deployment has that many."""
    args = scale_parser().parse(arguments)
    kind, _, count = args.what.partition("=")
    if not (kind and count.isdecimal()):
        raise ConfigError(f"{args.what!r} is not KIND=COUNT", hint="e.g. dynamo scale worker=5")
    return send_control_request(args, "scale", kind, int(count))


DRAIN_EXAMPLES = """\
  dynamo drain worker-2"""


def drain_parser() -> Parser:
    """Return the parser of `dynamo drain`."""
    parser = Parser(
        "dynamo drain",
        "Take one process out of service. The process gets no new requests and is not restarted. "
        "Its requests in flight move to others; the last process of a kind finishes its own.",
        DRAIN_EXAMPLES,
    )
    parser.add_argument("name", metavar="PROCESS", help="name of the process in `dynamo ps`")
    add_deployment_flags(parser)
    return parser


def run_drain(arguments: Sequence[str]) -> int:
    """Drain a process and wait until it has ended."""
    args = drain_parser().parse(arguments)
    return send_control_request(args, "drain", args.name)


RESTART_EXAMPLES = """\
  dynamo restart                  every worker, one after the other
  dynamo restart worker-2         one process
  dynamo restart frontend"""


def restart_parser() -> Parser:
    """Return the parser of `dynamo restart`."""
    parser = Parser(
        "dynamo restart",
        "Replace processes one by one. An old process ends when its replacement serves; its "
        "requests move to others. The machine needs room for one more process meanwhile.",
        RESTART_EXAMPLES,
    )
    parser.add_argument(
        "what", nargs="?", default="worker", metavar="PROCESS|KIND", help="default: worker"
    )
    add_deployment_flags(parser)
    return parser


def run_restart(arguments: Sequence[str]) -> int:
    """Restart processes and wait until all are replaced."""
    args = restart_parser().parse(arguments)
    return send_control_request(args, "restart", args.what)
