"""The table of commands: each is loaded only when it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

import msgspec

from dynamo.cli.parsing import Parser

RunCommand = Callable[[Sequence[str]], int]


class Command(msgspec.Struct, frozen=True):
    """A command. The functions named `parser` (`() -> Parser`) and `run` (`(arguments) -> exit code`)
    stand in `module`. A hidden command is not listed in the help."""

    module: str
    help: str
    hidden: bool = False
    run: str = "run"
    parser: str = "parser"


COMMANDS = {
    "run": Command("dynamo.cli.run", "serve a model: frontend and workers, one command"),
    "chat": Command("dynamo.cli.chat", "talk with a served model in the terminal"),
    "serve": Command("dynamo.cli.serve", "serve a graph of services: yours and ready-made ones"),
    "indexer": Command("dynamo.cli.indexer", "keep one index of cached blocks for several routers"),
    "call": Command("dynamo.cli.call", "call one endpoint of a service that runs"),
    "ps": Command("dynamo.cli.ps", "list the processes of every deployment of this user"),
    "stop": Command("dynamo.cli.stop", "stop a deployment"),
    "scale": Command(
        "dynamo.cli.control",
        "more or fewer processes of a kind, while it serves",
        run="run_scale",
        parser="scale_parser",
    ),
    "drain": Command(
        "dynamo.cli.control",
        "take one process out of service; its work moves on",
        run="run_drain",
        parser="drain_parser",
    ),
    "restart": Command(
        "dynamo.cli.control",
        "replace processes one by one, while it serves",
        run="run_restart",
        parser="restart_parser",
    ),
    "explain": Command("dynamo.cli.explain", "why a request went to the worker that answered it"),
    "router": Command("dynamo.cli.router", "how a deployment routes: page, picture, report"),
    "doctor": Command("dynamo.cli.doctor", "check this machine and say what to mend"),
    "config": Command("dynamo.cli.config", "explain a configuration; the schema of its files"),
    "bench": Command(
        "dynamo.cli.benchmark.bench", "measure a server: latency, throughput, goodput"
    ),
    "replay": Command(
        "dynamo.cli.benchmark.replay", "what a trace would do on a cluster: a simulation"
    ),
    "_child": Command("dynamo.cli.child", "one process of a deployment", hidden=True),
}


def command_run(name: str) -> RunCommand:
    """Return the function that runs a command of `COMMANDS`."""
    command = COMMANDS[name]
    run: RunCommand = getattr(import_module(command.module), command.run)
    return run


def command_parser(name: str) -> Parser:
    """Return a command's parser, for its help and the reference page."""
    command = COMMANDS[name]
    parser: Parser = getattr(import_module(command.module), command.parser)()
    return parser
