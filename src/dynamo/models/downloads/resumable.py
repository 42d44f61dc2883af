"""Download of a URL that continues an earlier attempt with HTTP ranges."""

from __future__ import annotations

import logging
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

log = logging.getLogger(__name__)

_TIMEOUT_S = 30.0
_MAX_ATTEMPTS = 20
_READ_BYTES = 1 << 18
_HTTP_PARTIAL_CONTENT, _HTTP_RANGE_NOT_SATISFIABLE = 206, 416


def fetch_resumable(url: str, part: Path, on_bytes: Callable[[int], None]) -> bool:
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
            log.info("download interrupted", extra={"fields": {"why": str(error)}})
        if not part.is_file() or part.stat().st_size <= before:
            return False
    return False


def _fetch_rest(url: str, part: Path, start: int, on_bytes: Callable[[int], None]) -> bool:
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
