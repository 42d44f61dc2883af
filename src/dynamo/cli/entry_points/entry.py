"""`python -m dynamo.frontend` and its kin: arguments of NVIDIA Dynamo's processes become settings
of a deployment without workers, or of workers without a frontend."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.cli.entry_points.flags import NO_EFFECT, DynFlag, add_flags, read_flags, translate
from dynamo.cli.parsing import Parser
from dynamo.core.errors import ConfigError
from dynamo.core.settings import LoadedSettings, SourcedValue

ROUTER_OF_WORKERS = "the router of each frontend has the settings of that frontend"


class EntryPoint(msgspec.Struct, frozen=True):
    """A process of NVIDIA Dynamo. `tables` have its flags, and `router` those that only matter to
    frontends and routers. `engine` is that of its workers, and `service` the ready-made service
    that runs alone; a frontend has neither. Other flags are passed on to the engine if it
    `passes_flags`."""

    name: str
    description: str
    tables: tuple[str, ...]
    engine: str = ""
    passes_flags: bool = False
    service: str = ""

    def flags(self) -> list[DynFlag]:
        """Return the flags, with those of routers without effect for workers."""
        flags = [flag for table in self.tables for flag in read_flags(table)]
        if self.service == "Planner":
            return flags
        if not self.engine:
            return [*flags, *read_flags("router")]
        own = {name for flag in flags for name in flag.names}
        return flags + [
            msgspec.structs.replace(flag, effect=NO_EFFECT, text=ROUTER_OF_WORKERS)
            for flag in read_flags("router")
            if not own.intersection(flag.names)
        ]

    def parser(self) -> Parser:
        """Return the parser."""
        parser = Parser(f"python -m dynamo.{self.name}", self.description)
        if self.service == "Planner":
            parser.add_argument(
                "--config", metavar="TEXT|FILE", help="flags as fields, JSON or YAML"
            )
        add_flags(parser, self.flags())
        return parser

    def run(self, arguments: Sequence[str]) -> int:
        """Serve until stopped."""
        settings = self.settings(arguments, os.environ)

        from dynamo.cli.run import checked_settings, print_note, serve_http
        from dynamo.cli.settings_flags import load_settings

        args = argparse.Namespace(config="")
        loaded = load_settings(args, extra=settings)
        if self.service:
            return self._serve_service(args, settings)
        checked = checked_settings(loaded, print_note)
        return serve_http(checked, args, settings, workers_only=bool(self.engine))

    def _serve_service(self, args: argparse.Namespace, settings: Mapping[str, SourcedValue]) -> int:
        """Serve a ready-made service without its graph until stopped."""
        from dynamo.cli.serve import check_plan, serve_plan
        from dynamo.cli.settings_flags import read_settings
        from dynamo.services import components
        from dynamo.services.deployment.plan import DeploymentPlan, plan_deployment

        def load(extra: Mapping[str, SourcedValue]) -> LoadedSettings:
            return read_settings(args, extra={**settings, **extra})

        def make_plan() -> DeploymentPlan:
            return plan_deployment(getattr(components, self.service), load({}), load, only=True)

        plan = make_plan()
        check_plan(plan, {})
        return serve_plan(plan, make_plan, args)

    def settings(
        self, arguments: Sequence[str], environ: Mapping[str, str]
    ) -> Mapping[str, SourcedValue]:
        """Return the settings of the arguments, and those of planes that the environment has by
        NVIDIA Dynamo's names. Prints notes. Raises `ConfigError` and `Unsupported`."""
        from dynamo.cli.run import print_note

        flags, parser = self.flags(), self.parser()
        if self.service == "Planner":
            arguments = expand_document(arguments, flags)
        native: list[str] = []
        if self.passes_flags:
            args, native = parser.parse_known_args(list(arguments))
        else:
            args = parser.parse(arguments)
        translation = translate(flags, args, environ)
        for note in translation.notes:
            print_note(note)
        planes = plane_settings(environ, translation.planes)
        settings = {**self._basis(), **planes, **translation.settings}
        if native:
            settings["engine.args"] = SourcedValue(engine_arguments(native), "arguments")
        return settings

    def _basis(self) -> dict[str, SourcedValue]:
        origin = f"dynamo.{self.name}"
        if not (self.engine or self.service):
            return {"engine.workers": SourcedValue(0, origin)}
        name = f"{self.name}-{os.getpid()}"
        deployment = {"runtime.deployment": SourcedValue(name, origin)}
        return (
            deployment
            if self.service
            else {"engine.kind": SourcedValue(self.engine, origin), **deployment}
        )


def plane_settings(
    environ: Mapping[str, str], flags: Mapping[str, str]
) -> Mapping[str, SourcedValue]:
    """Return the settings of planes that `flags`, by their variables, and the environment stand
    for, without those that the environment has itself. Without a server or a folder, pods of a
    graph find each other by Kubernetes; others share the folder that programs of the user use."""
    from dynamo.core.settings import Settings
    from dynamo.core.settings.load import read_environment
    from dynamo.runtime.deployment import deployment_of
    from dynamo.runtime.environment import with_dyn_names
    from dynamo.runtime.planes import GRAPH_VARIABLE

    variables = with_dyn_names({**environ, **flags})
    in_graph = environ.get(GRAPH_VARIABLE) and environ.get("POD_UID")
    if "DYNAMO_ETCD_ENDPOINTS" not in variables and not in_graph:
        shared = deployment_of(Settings()).discovery_url
        variables = {"DYNAMO_RUNTIME__DISCOVERY": shared, **variables}
    own = read_environment(environ)
    settings = read_environment(variables)
    return {key: value for key, value in settings.items() if key not in own}


def engine_arguments(words: Sequence[str]) -> list[str]:
    """Return flags of an engine as NAME=VALUE. Raises `ConfigError` for a word without a flag."""
    pairs: list[str] = []
    open_flag = False
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            positive = name.removeprefix("no-")
            default = "true" if positive == name else "false"
            pairs.append(f"{positive.replace('-', '_')}={value if equals else default}")
            open_flag = not equals and positive == name
        elif open_flag:
            pairs[-1] = f"{pairs[-1].partition('=')[0]}={word}"
            open_flag = False
        else:
            raise ConfigError(
                f"unknown argument {word!r}", hint="flags of the engine have one value each"
            )
    return pairs


def expand_document(arguments: Sequence[str], flags: Sequence[DynFlag]) -> list[str]:
    """Return arguments with the fields of the document that `--config` is or names as flags.
    Raises `ConfigError`."""
    switches = {name for flag in flags if flag.takes_no_value for name in flag.names}
    words: list[str] = []
    remaining = iter(arguments)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name != "--config":
            words.append(word)
            continue
        for field, content in read_document(value if equals else next(remaining, "")).items():
            flag = f"--{field.replace('_', '-')}"
            if flag in switches:
                words.append(flag if content else f"--no-{flag[2:]}")
            elif content is not None:
                text = (
                    content if isinstance(content, str) else msgspec.json.encode(content).decode()
                )
                words.append(f"{flag}={text}")
    return words


def read_document(text: str) -> dict[str, Any]:
    """Return the fields of a JSON text, or of the JSON or YAML file that it names. Raises
    `ConfigError`."""
    from dynamo.runtime.environment import read_config_file

    content = text if text.lstrip().startswith("{") else read_config_file(text)[0]
    try:
        return msgspec.yaml.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"--config is no document with fields: {error}") from None


FRONTEND = EntryPoint(
    "frontend",
    "Serve the OpenAI API for workers that run elsewhere.\n\n"
    "Flags and DYN_... variables are those of NVIDIA Dynamo. `dynamo run` has more.",
    ("planes", "tls", "frontend"),
)
MOCKER = EntryPoint(
    "mocker",
    "Run simulated workers for a frontend.\n\nFlags are those of NVIDIA Dynamo.",
    ("planes", "mocker"),
    engine="mock",
)
VLLM = EntryPoint(
    "vllm",
    "Run a worker with vLLM for a frontend.\n\n"
    "Flags and DYN_... variables are those of NVIDIA Dynamo; others are passed on to vLLM.",
    ("planes", "tls", "worker", "vllm"),
    engine="vllm",
    passes_flags=True,
)
SGLANG = EntryPoint(
    "sglang",
    "Run a worker with SGLang for a frontend.\n\n"
    "Flags and DYN_... variables are those of NVIDIA Dynamo; others are passed on to SGLang.",
    ("planes", "tls", "worker", "sglang"),
    engine="sglang",
    passes_flags=True,
)
TRTLLM = EntryPoint(
    "trtllm",
    "Run a worker with TensorRT-LLM for a frontend.\n\nFlags are those of NVIDIA Dynamo.",
    ("planes", "tls", "worker", "trtllm"),
    engine="trtllm",
)
ROUTER = EntryPoint(
    "router",
    "Run a router apart from frontends, which use it with router.replicas.\n\n"
    "Flags are those of NVIDIA Dynamo.",
    ("planes", "standalone_router"),
    service="Router",
)
PLANNER = EntryPoint(
    "planner",
    "Run a planner, which changes the number of workers by the load.\n\n"
    "Flags, and fields of the document --config, are those of NVIDIA Dynamo.",
    ("planes", "planner"),
    service="Planner",
)
