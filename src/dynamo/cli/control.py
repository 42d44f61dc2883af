"""`dynamo scale`, `dynamo drain` and `dynamo restart`: control requests to a deployment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from dynamo.cli.parsing import Parser
from dynamo.core.errors import ConfigError, DeadlineExceeded

DEFAULT_TIMEOUT_S = 120.0


class ControlCommand(msgspec.Struct, frozen=True):
    """A command that sends a control request. `target` declares its only argument."""

    name: Literal["scale", "drain", "restart"]
    description: str
    examples: str
    target: Mapping[str, Any]

    def parser(self) -> Parser:
        """Return the parser: the target, the deployment and the timeout."""
        parser = Parser(f"dynamo {self.name}", self.description, self.examples)
        parser.add_argument("target", **self.target)
        parser.add_argument(
            "--deployment", metavar="NAME|PORT", help="deployment, if several run (see `dynamo ps`)"
        )
        parser.add_argument(
            "--timeout",
            type=float,
            default=DEFAULT_TIMEOUT_S,
            metavar="SECONDS",
            help=f"wait so long (default: {DEFAULT_TIMEOUT_S:g}); the deployment completes the "
            "request even after a timeout",
        )
        return parser

    def run(self, arguments: Sequence[str]) -> int:
        """Send the request and print the deployment's messages until it is done."""
        from dynamo.cli.stop import select_deployments
        from dynamo.runtime.deployment import live_deployments
        from dynamo.runtime.processes.control import ControlRequest, send_control_request
        from dynamo.runtime.processes.process_group import DEFAULT_KIND

        args = self.parser().parse(arguments)
        name, _, count = args.target.partition("=") if self is SCALE else (args.target, "", "0")
        if self is SCALE and not (name and count.isdecimal()):
            hint = "e.g. dynamo scale worker=5"
            raise ConfigError(f"{args.target!r} is not KIND=COUNT", hint=hint)
        (deployment,) = select_deployments(live_deployments(), args.deployment)
        unnamed = self is RESTART and not name
        request = ControlRequest(self.name, DEFAULT_KIND if unnamed else name, int(count), unnamed)
        try:
            for message in send_control_request(request, deployment.folder, args.timeout):
                print(message, flush=True)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{deployment.id} is not done after {args.timeout:g} s",
                hint="the deployment continues; `dynamo ps` shows its state",
            ) from None
        return 0


SCALE = ControlCommand(
    "scale",
    "Set the number of processes of one kind. The command returns when new processes serve. "
    "Requests of stopped processes move to the others.",
    """\
  dynamo scale worker=5
  dynamo scale worker=2 --deployment 8000     the deployment on this port""",
    {"metavar": "KIND=COUNT", "help": "e.g. worker=5"},
)
DRAIN = ControlCommand(
    "drain",
    "Take one process out of service. The process gets no new requests and is not restarted. "
    "Its requests in flight move to others; the last process of a kind finishes its own.",
    "  dynamo drain worker-2",
    {"metavar": "PROCESS", "help": "name or instance of the process in `dynamo ps`"},
)
RESTART = ControlCommand(
    "restart",
    "Replace processes one by one. An old process ends when its replacement serves; its "
    "requests move to others. The machine needs room for one more process meanwhile.",
    """\
  dynamo restart                  every worker, or every process of a graph, one after the other
  dynamo restart worker-2         one process
  dynamo restart frontend""",
    {
        "nargs": "?",
        "default": "",
        "metavar": "PROCESS|KIND",
        "help": "also an instance; default: every worker, or every process of a graph",
    },
)
