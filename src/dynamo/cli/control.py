"""`dynamo scale`, `drain` and `restart`: control requests to a deployment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from dynamo.cli.parsing import Parser
from dynamo.core.errors import ConfigError, DeadlineExceeded

if TYPE_CHECKING:
    from dynamo.runtime.processes.control import ControlRequest

DEFAULT_TIMEOUT_S = 120.0
DEPLOYMENT_HELP = "deployment, if several run (see `dynamo ps`)"


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
        parser.add_argument("--deployment", metavar="NAME|PORT", help=DEPLOYMENT_HELP)
        add_timeout_flag(parser)
        return parser

    def run(self, arguments: Sequence[str]) -> int:
        """Send the request and print the deployment's messages until it is done."""
        from dynamo.runtime.processes.control import ControlRequest

        args = self.parser().parse(arguments)
        name, _, count = args.target.partition("=") if self is SCALE else (args.target, "", "0")
        if self is SCALE and not (name and count.isdecimal()):
            hint = "e.g. dynamo scale worker=5"
            raise ConfigError(f"{args.target!r} is not KIND=COUNT", hint=hint)
        request = ControlRequest(self.name, name, int(count))
        return print_progress(request, args.deployment, args.timeout)


def add_timeout_flag(parser: Parser) -> None:
    """Add --timeout, after which the deployment completes the request all the same."""
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help=f"wait so long (default: {DEFAULT_TIMEOUT_S:g}); the deployment completes the "
        "request even after a timeout",
    )


def print_progress(request: ControlRequest, deployment: str | None, timeout_s: float) -> int:
    """Send a request, print the deployment's messages and return the exit code. Raises as
    `send`."""
    for message in send(request, deployment, timeout_s):
        print(message, flush=True)
    return 0


def send(request: ControlRequest, deployment: str | None, timeout_s: float) -> Iterator[str]:
    """Send a request to the deployment of this name or port, or the only one, and yield its
    messages. Raises the errors of the request, `ConfigError`, `NotFound` and
    `DeadlineExceeded`."""
    from dynamo.cli.stop import select_deployments
    from dynamo.runtime.deployment import live_deployments
    from dynamo.runtime.processes.control import send_control_request

    (selected,) = select_deployments(live_deployments(), deployment)
    try:
        yield from send_control_request(request, selected.folder, timeout_s)
    except TimeoutError:
        raise DeadlineExceeded(
            f"{selected.id} is not done after {timeout_s:g} s",
            hint="the deployment continues; `dynamo ps` shows its state",
        ) from None


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
