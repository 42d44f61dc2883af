"""The table of commands. A command's module is imported when the command runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import msgspec

from dynamo.cli.parsing import Parser

RunCommand = Callable[[Sequence[str]], int]


class Command(msgspec.Struct, frozen=True):
    """A command. `target` is a module, or MODULE:OBJECT, with two functions: `run(arguments)`
    returns the exit code, `parser()` a `Parser`. A hidden command is not listed in the help."""

    target: str
    help: str
    hidden: bool = False


COMMANDS = {
    "run": Command("dynamo.cli.run", "serve a model: frontend and workers in one command"),
    "chat": Command("dynamo.cli.chat", "chat with a served model in the terminal"),
    "serve": Command("dynamo.cli.serve", "serve a graph of services"),
    "indexer": Command("dynamo.cli.indexer", "keep one index of cached blocks for several routers"),
    "call": Command("dynamo.cli.call", "call one endpoint of a running service"),
    "ps": Command("dynamo.cli.ps", "list the processes of every deployment of this user"),
    "stop": Command("dynamo.cli.stop", "stop a deployment"),
    "scale": Command("dynamo.cli.control:SCALE", "change the number of processes of a kind"),
    "drain": Command(
        "dynamo.cli.control:DRAIN", "take one process out of service; its requests move to others"
    ),
    "restart": Command(
        "dynamo.cli.control:RESTART", "replace processes one by one without downtime"
    ),
    "models": Command("dynamo.cli.models.served:MODELS", "list served models, move aliases"),
    "add": Command(
        "dynamo.cli.models.served:ADD", "add a model to a deployment, or a server as a worker"
    ),
    "remove": Command("dynamo.cli.models.served:REMOVE", "remove a model, or an added server"),
    "roles": Command(
        "dynamo.cli.workers.roles", "change what a worker computes: prompts, answers or both"
    ),
    "sleep": Command(
        "dynamo.cli.workers.sleep:SLEEP", "let workers give their memory back until they are woken"
    ),
    "wake": Command("dynamo.cli.workers.sleep:WAKE", "let sleeping workers serve again"),
    "snapshot": Command(
        "dynamo.cli.workers.snapshot", "save a process with its model loaded; start workers of it"
    ),
    "kv": Command("dynamo.cli.workers.kv", "show or empty the KV blocks of the workers, by tier"),
    "why": Command("dynamo.cli.observer.why", "tell where the time of a request went, and why"),
    "top": Command("dynamo.cli.observer.top.command", "show what a deployment does now"),
    "console": Command("dynamo.cli.observer.console", "open a deployment's pages in a browser"),
    "slo": Command(
        "dynamo.cli.observer.slo", "show how many requests were answered right and in time"
    ),
    "report": Command(
        "dynamo.cli.report", "write an archive on a deployment's state, to find a fault"
    ),
    "explain": Command("dynamo.cli.explain", "explain why a request was routed to its worker"),
    "router": Command("dynamo.cli.router", "show how a deployment routes: page and report"),
    "store": Command(
        "dynamo.cli.store.command:STORE", "list, fetch, check and delete models on this machine"
    ),
    "pull": Command("dynamo.cli.store.command:PULL", "fetch a model from the hub or a bucket"),
    "list": Command("dynamo.cli.store.command:LIST", "list the models on this machine"),
    "rm": Command("dynamo.cli.store.command:REMOVE", "delete a model from this machine"),
    "engines": Command(
        "dynamo.cli.models.engines", "list the engines that serve a model here, and why"
    ),
    "doctor": Command("dynamo.cli.doctor", "check this machine and suggest fixes"),
    "config": Command(
        "dynamo.cli.config", "explain a configuration; print the schema of its files"
    ),
    "configure": Command(
        "dynamo.cli.foresight.configure", "choose and write a configuration for GPUs and a load"
    ),
    "export": Command("dynamo.cli.models.export", "write a model in float32 for other engines"),
    "bench": Command(
        "dynamo.cli.benchmark.bench", "measure a server: latency, throughput, goodput"
    ),
    "record": Command(
        "dynamo.cli.foresight.record", "show the record of requests, or write it as a trace"
    ),
    "calibrate": Command(
        "dynamo.cli.foresight.calibrate", "fit an engine's timing to what its requests measured"
    ),
    "plan": Command(
        "dynamo.cli.foresight.plan", "show the planner's decisions, or try a policy on a record"
    ),
    "tune": Command(
        "dynamo.cli.foresight.tune", "find better settings by a record, and try them on a process"
    ),
    "replay": Command("dynamo.cli.benchmark.replay", "simulate a trace on a cluster"),
    "kubernetes": Command(
        "dynamo.cli.kubernetes.command", "graphs on Kubernetes: kinds, conversion, placement"
    ),
    **{
        f"_{name}": Command(
            f"dynamo.cli.entry_points.entry:{name.upper()}", f"NVIDIA Dynamo's {name}", hidden=True
        )
        for name in ("frontend", "mocker", "vllm", "sglang", "trtllm", "router", "planner")
    },
    "_child": Command("dynamo.cli.child", "a process of a deployment", hidden=True),
}


def command_run(name: str) -> RunCommand:
    """Return the function that runs a command of `COMMANDS`."""
    run: RunCommand = _import_target(name).run
    return run


def command_parser(name: str) -> Parser:
    """Return a command's parser, for its help and the reference page."""
    parser: Parser = _import_target(name).parser()
    return parser


def _import_target(name: str) -> Any:
    module, _, attribute = COMMANDS[name].target.partition(":")
    imported = import_module(module)
    return getattr(imported, attribute) if attribute else imported
