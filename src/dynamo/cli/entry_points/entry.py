"""`python -m dynamo.frontend` and its kin: arguments of NVIDIA Dynamo's processes become settings
of a deployment without workers, or of workers without a frontend."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence

import msgspec

from dynamo.cli.entry_points.flags import (
    NO_EFFECT,
    DynFlag,
    add_flags,
    read_flags,
    translate,
)
from dynamo.cli.parsing import Parser
from dynamo.core.errors import ConfigError, Unsupported
from dynamo.core.settings import SourcedValue

ROUTER_OF_WORKERS = "the router of each frontend has the settings of that frontend"


class EntryPoint(msgspec.Struct, frozen=True):
    """A process of NVIDIA Dynamo. `tables` have its flags, and `router` those that only matter to
    frontends. `engine` is that of its workers, "" for a frontend. Other flags are passed on to the
    engine if it `passes_flags`."""

    name: str
    description: str
    tables: tuple[str, ...]
    engine: str = ""
    passes_flags: bool = False

    def flags(self) -> list[DynFlag]:
        """Return the flags, with those of routers without effect for workers."""
        flags = [flag for table in self.tables for flag in read_flags(table)]
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
        add_flags(parser, self.flags())
        return parser

    def run(self, arguments: Sequence[str]) -> int:
        """Serve until stopped."""
        settings = self.settings(arguments, os.environ)

        from dynamo.cli.run import checked_settings, print_note, serve_http
        from dynamo.cli.settings_flags import load_settings

        args = argparse.Namespace(config="")
        loaded = load_settings(args, extra=settings)
        checked = checked_settings(loaded, print_note)
        return serve_http(checked, args, settings, workers_only=bool(self.engine))

    def settings(
        self, arguments: Sequence[str], environ: Mapping[str, str]
    ) -> Mapping[str, SourcedValue]:
        """Return the settings of the arguments, and those of planes that the environment has by
        NVIDIA Dynamo's names. Prints notes. Raises `ConfigError` and `Unsupported`."""
        from dynamo.cli.run import print_note

        flags, parser = self.flags(), self.parser()
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
        if not self.engine:
            return {"engine.workers": SourcedValue(0, origin)}
        name = f"{self.name}-{os.getpid()}"
        return {
            "engine.kind": SourcedValue(self.engine, origin),
            "runtime.deployment": SourcedValue(name, origin),
        }


def plane_settings(
    environ: Mapping[str, str], flags: Mapping[str, str]
) -> Mapping[str, SourcedValue]:
    """Return the settings of planes that `flags`, by their variables, and the environment stand
    for, without those that the environment has itself. Without a server or a folder, all processes
    of the user on this host share the folder that programs use."""
    from dynamo.core.settings import Settings
    from dynamo.core.settings.load import read_environment
    from dynamo.runtime.deployment import deployment_of
    from dynamo.runtime.environment import with_dyn_names

    variables = with_dyn_names({**environ, **flags})
    if "DYNAMO_ETCD_ENDPOINTS" not in variables:
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


class MissingEntryPoint(msgspec.Struct, frozen=True):
    """A process of NVIDIA Dynamo that does not exist here. `hint` says what to use."""

    name: str
    hint: str

    def parser(self) -> Parser:
        """Return a parser without flags, whose help says what to use."""
        return Parser(f"python -m dynamo.{self.name}", f"Does not exist here: {self.hint}.")

    def run(self, arguments: Sequence[str]) -> int:
        """Raise `Unsupported`."""
        if set(arguments) & {"-h", "--help"}:
            self.parser().parse(["--help"])
        raise Unsupported(f"python -m dynamo.{self.name} does not exist here", hint=self.hint)


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
    ("planes", "tls", "vllm"),
    engine="vllm",
    passes_flags=True,
)
SGLANG = MissingEntryPoint("sglang", "use `dynamo run in=none out=sglang MODEL`")
TRTLLM = MissingEntryPoint("trtllm", "use `dynamo run in=none out=trtllm MODEL`")
ROUTER = MissingEntryPoint(
    "router", "frontends route by themselves; `dynamo run --router-replicas N` starts routers apart"
)
PLANNER = MissingEntryPoint(
    "planner", "`dynamo serve --planner` sets the number of workers, and `dynamo plan` shows why"
)
