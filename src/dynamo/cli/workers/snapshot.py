"""`dynamo snapshot save|load`: save a process that has loaded a model, and start workers of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynamo.cli import run as run_command
from dynamo.cli.parsing import Parser
from dynamo.cli.settings_flags import add_settings_flags, load_settings, read_settings
from dynamo.core.errors import ConfigError, Unsupported
from dynamo.core.settings import SourcedValue

ENGINES = ("native", "mock")
EXAMPLES = """\
  dynamo snapshot save ./smollm SmolLM2-135M-Instruct
  dynamo snapshot load ./smollm --workers 4"""


def parser() -> Parser:
    """Return the parser: the action, the folder, the words and flags of `dynamo run`."""
    parser = Parser(
        "dynamo snapshot",
        "Save a process that has loaded a model; serve with workers that are forked from it.\n\n"
        "A snapshot fits to the host's kernel, to its processor and to this version. Who can read "
        "the folder can read the model.",
        EXAMPLES,
        usage="{save,load} FOLDER [in= out= MODEL] [FLAGS of dynamo run]",
    )
    parser.add_argument("action", choices=("save", "load"), metavar="ACTION", help="save or load")
    parser.add_argument("folder", metavar="FOLDER", help="folder of the snapshot")
    parser.add_argument("words", nargs="*", metavar="in= out= MODEL", help="see `dynamo run`")
    parser.add_argument(
        "--driver", default="criu", help="program that saves processes (default: criu)"
    )
    add_settings_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Save a snapshot, or serve until stopped."""
    args = parser().parse(arguments)
    source, words = run_command.parse_words(args.words)
    folder = Path(args.folder)
    return (
        _save(folder, args, words)
        if args.action == "save"
        else _load(folder, args, words, workers_only=source == run_command.NONE)
    )


def _save(folder: Path, args: argparse.Namespace, words: Mapping[str, SourcedValue]) -> int:
    from dynamo.cli.progress_bar import ProgressBar
    from dynamo.models.resolve import resolve_model_blocking
    from dynamo.operations.snapshot.folder import save_snapshot

    settings = run_command.checked_settings(load_settings(args, extra=words))
    kind = settings.engine.kind
    if settings.models or kind not in ENGINES:
        what = "several models" if settings.models else f"the engine {kind!r}"
        raise Unsupported(
            f"a snapshot of {what} cannot be saved",
            hint=f"name one model, and out={' or out='.join(ENGINES)}",
        )

    def fetch() -> None:
        with ProgressBar(sys.stderr) as progress:
            resolve_model_blocking(settings.model.path, progress, with_weights=kind == "native")

    save_snapshot(folder, settings, args.driver, fetch)
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    print(f"{folder} has a snapshot of {size:.0f} MB: dynamo snapshot load {folder}")
    return 0


def _load(
    folder: Path,
    args: argparse.Namespace,
    words: Mapping[str, SourcedValue],
    *,
    workers_only: bool,
) -> int:
    from dynamo.operations.snapshot.folder import read_snapshot

    manifest, restore = read_snapshot(folder)
    _refuse_others(args, words, manifest.settings)
    saved = {
        key: SourcedValue(value, f"snapshot {folder}") for key, value in manifest.settings.items()
    }
    loaded = load_settings(args, extra=saved)
    settings = run_command.checked_settings(loaded, run_command.print_note)
    return run_command.serve_http(
        settings,
        args,
        saved,
        workers_only=workers_only,
        defaults=loaded.settings,
        restore=restore,
    )


def _refuse_others(
    args: argparse.Namespace, words: Mapping[str, SourcedValue], saved: Mapping[str, Any]
) -> None:
    """Raise `ConfigError` for flags and words that contradict the settings of a snapshot."""
    settings = msgspec.to_builtins(read_settings(args, words).settings)
    for key in saved.keys() & (vars(args).keys() | words.keys()):
        section, _, name = key.partition(".")
        if settings[section][name] != saved[key]:
            raise ConfigError(
                f"{key} is {settings[section][name]!r}, and the snapshot was saved with "
                f"{saved[key]!r}",
                hint="leave it out, or save another snapshot",
            )
