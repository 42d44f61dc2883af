"""What `dynamo scale`, `drain` and `restart` share: which deployment, and an order to it."""

from __future__ import annotations

import argparse
from typing import Literal

from dynamo.cli.parsing import Parser
from dynamo.core.errors import DeadlineExceeded

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
    from dynamo.runtime.control import ControlRequest, send_control_request
    from dynamo.runtime.deployment import live_deployments

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
