"""`dynamo scale`, `drain`, `restart`, `add` and `remove`: control requests to a deployment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from dynamo.cli.parsing import Parser
from dynamo.core.errors import ConfigError, DeadlineExceeded
from dynamo.core.settings.server_url import server_url

DEFAULT_TIMEOUT_S = 120.0


class ControlCommand(msgspec.Struct, frozen=True):
    """A command that sends a control request. `target` declares its only argument."""

    name: Literal["scale", "drain", "restart", "add", "remove"]
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
        if self is ADD:
            parser.add_argument(
                "--model-name", default="", metavar="NAME", help="its model, if it has several"
            )
            parser.add_argument(
                "--kv-events",
                default="",
                metavar="tcp://HOST:PORT[/REPLAY_PORT]",
                help="where it publishes its KV events; without them its cache is predicted",
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
        if self is ADD or self is REMOVE:
            name = server_url(name)
        request = ControlRequest(
            self.name,
            DEFAULT_KIND if unnamed else name,
            int(count),
            unnamed,
            args.model_name if self is ADD else "",
            args.kv_events if self is ADD else "",
        )
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
ADD = ControlCommand(
    "add",
    "Add a server with an OpenAI API to a deployment, as one more worker of its model. The command "
    "returns when it serves. Its model must be that of the deployment.",
    """\
  dynamo add http://10.0.0.5:8000
  dynamo add http://10.0.0.5:8000 --model-name smollm2""",
    {"metavar": "URL", "help": "the server, e.g. http://10.0.0.5:8000"},
)
REMOVE = ControlCommand(
    "remove",
    "Remove a server from a deployment. Its requests in flight move to other workers.",
    "  dynamo remove http://10.0.0.5:8000",
    {"metavar": "URL", "help": "the server, as it was added"},
)
