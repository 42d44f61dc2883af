"""The Hugging Face hub as a source, or a mirror of it: HF_ENDPOINT, HF_TOKEN."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from email.message import Message
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from time import time
from typing import IO, Any
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from msgspec.structs import replace

from dynamo.core.errors import ModelUnavailable
from dynamo.core.redaction import remember_secrets
from dynamo.models.downloads.sources import (
    MAIN,
    ModelSpec,
    SourceBusy,
    SourceUnavailable,
    changed_error,
    choose_files,
)
from dynamo.models.shelf.manifest import Manifest, ManifestFile

BETTER_MODELS = (("Qwen/Qwen3-4B", 20e9), ("Qwen/Qwen3-1.7B", 9e9), ("Qwen/Qwen3-0.6B", 4e9))
"""Models that know more than the default one, and the free memory that each needs in float32."""
DEFAULT_ENDPOINT = "https://huggingface.co"
ANSWER_TIMEOUT_S = 20.0
READ_BYTES = 1 << 18
MAX_INFO_BYTES = 32 << 20
MAX_SMALL_BYTES = 64 << 20
"""A larger file must have a SHA-256 on the hub."""
DEFAULT_WAIT_S = 30.0
MAX_WAIT_S = 600.0
_PARTIAL, _UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _BUSY, _UNAVAILABLE = 206, 401, 403, 404, 429, 503


class _Redirects(HTTPRedirectHandler):
    """Follows redirects. The token goes to the hub's own host only."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            request.remove_header("Authorization")
        return request


class HubSource:
    """A repository on the hub, at one revision."""

    kind = "hub"

    def __init__(self, spec: ModelSpec, *, with_weights: bool) -> None:
        self._spec = spec
        self._with_weights = with_weights
        self._endpoint = (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        self._token = _read_token()
        remember_secrets((self._token,) if self._token else ())
        self._small: dict[str, bytes] = {}
        self._opener = build_opener(_Redirects)

    def resolve(self, known: list[Manifest]) -> Manifest:
        name, spec = self._spec.repository, self._spec
        path = f"/api/models/{name}/revision/{quote(spec.revision, safe='')}?blobs=true"
        with self._open(path) as response:
            data = response.read(MAX_INFO_BYTES)
        try:
            info = json.loads(data)
            commit = str(info["sha"])
            entries = {str(entry["rfilename"]): entry for entry in info.get("siblings") or ()}
            names = choose_files(spec, list(entries), with_weights=self._with_weights)
            old = [manifest.files for manifest in known if manifest.commit == commit]
            known_files = {file.path: file for files in old for file in files}
            files = tuple(
                self._describe(commit, name, entries[name], known_files.get(name)) for name in names
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SourceUnavailable(
                f"{name} cannot be fetched from the hub: the answer of {self._endpoint} is not "
                "that of a hub",
                hint="is HF_ENDPOINT a mirror of the hub? repeat the command: it resumes",
            ) from error
        return Manifest(spec.name, commit, files, self._endpoint, with_weights=self._with_weights)

    def read(
        self, manifest: Manifest, file: ManifestFile, span: range, sink: Callable[[bytes], object]
    ) -> None:
        if file.path in self._small:
            sink(self._small[file.path][span.start : span.stop])
            return
        with self._open(self._address(manifest.commit, file.path), span) as response:
            size = response.headers.get("Content-Range", "").rpartition("/")[2]
            if size.isdigit() and int(size) != file.size_bytes:
                raise changed_error(manifest)
            self._pass_on(response, span, sink)

    def _pass_on(
        self, response: HTTPResponse, span: range, sink: Callable[[bytes], object]
    ) -> None:
        """Read an answer's body, which may break off behind its first bytes."""
        skipped = 0 if response.status == _PARTIAL else span.start
        left, got = len(span), False
        try:
            while left and (chunk := response.read1(READ_BYTES)):
                chunk, skipped = chunk[skipped:], max(0, skipped - len(chunk))
                sink(chunk[:left])
                left, got = left - len(chunk[:left]), got or bool(chunk)
        except (OSError, HTTPException) as error:
            if not got:
                raise self._unreachable_error(error) from error
        if not got:
            raise self._unreachable_error("the answer has no content")

    def _describe(
        self, commit: str, path: str, entry: dict[str, Any], known: ManifestFile | None
    ) -> ManifestFile:
        """Return a file with its hash. A file without one on the hub is small and read now, unless
        it is `known`."""
        size, lfs = int(entry.get("size") or 0), entry.get("lfs")
        if isinstance(lfs, dict) and lfs.get("sha256"):
            return ManifestFile(path, int(lfs.get("size") or size), str(lfs["sha256"]))
        if known is not None and known.sha256:
            return replace(known, digests=b"")
        with self._open(self._address(commit, path)) as response:
            content = response.read(MAX_SMALL_BYTES + 1)
        oid = hashlib.sha1(b"blob %d\0" % len(content), usedforsecurity=False)
        oid.update(content)
        if len(content) > MAX_SMALL_BYTES or oid.hexdigest() != entry.get(
            "blobId", oid.hexdigest()
        ):
            raise SourceUnavailable(
                f"{path} of {self._spec.name} arrived damaged", hint="try again"
            )
        self._small[path] = content
        return ManifestFile(path, len(content), hashlib.sha256(content).hexdigest())

    def _address(self, commit: str, path: str) -> str:
        return f"/{self._spec.repository}/resolve/{commit}/{quote(path)}"

    def _open(self, path: str, span: range | None = None) -> HTTPResponse:
        """Send a request. Raises `SourceBusy`, `SourceUnavailable` and `ModelUnavailable`."""
        headers = {"User-Agent": "dynamo"}
        if span is not None:
            headers["Range"] = f"bytes={span.start}-{span.stop - 1}"
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            request = Request(self._endpoint + path, headers=headers)  # noqa: S310
            response: HTTPResponse = self._opener.open(request, timeout=ANSWER_TIMEOUT_S)
        except HTTPError as error:
            with error:
                raise self._explain(error, path) from error
        except (OSError, HTTPException, ValueError) as error:
            raise self._unreachable_error(error) from error
        return response

    def _unreachable_error(self, error: object) -> SourceUnavailable:
        reason = getattr(error, "reason", error)
        return SourceUnavailable(
            f"there is no file or folder {self._spec.name!r}, and the hub cannot be reached at "
            f"{self._endpoint}: {reason}",
            hint="check the network, or give the path of a model folder or GGUF file",
        )

    def _explain(self, error: HTTPError, path: str) -> ModelUnavailable:
        """Return the error for an answer of the hub that is none of 2xx."""
        name, status = self._spec.repository, error.code
        code = error.headers.get("X-Error-Code", "")
        if status in {_BUSY, _UNAVAILABLE}:
            return SourceBusy(
                f"the hub has no time for {name} ({status})", retry_after_s=_wait_s(error.headers)
            )
        if code == "GatedRepo" or (status == _FORBIDDEN and self._token):
            return ModelUnavailable(
                f"{name} is gated, or the token may not read it",
                hint=f"accept its licence at {self._endpoint}/{name} and set HF_TOKEN",
            )
        if status == _UNAUTHORIZED and self._token:
            return ModelUnavailable(
                f"the hub refuses the token for {name}",
                hint=f"make a new one at {self._endpoint}/settings/tokens and set HF_TOKEN",
            )
        if code == "RevisionNotFound" or (status == _NOT_FOUND and "/resolve/" in path):
            revision = self._spec.revision
            what = path.rpartition("/")[2] if "/resolve/" in path else f"the revision {revision}"
            return ModelUnavailable(
                f"{name} has not, or no longer, {what}",
                hint=f"the revisions are listed at {self._endpoint}/{name}/commits/{MAIN}",
            )
        if status in {_NOT_FOUND, _UNAUTHORIZED}:
            return ModelUnavailable(
                f"there is no file, folder or hub model {name!r}",
                hint="check the spelling; a private model needs HF_TOKEN",
            )
        return SourceUnavailable(
            f"{name} cannot be fetched from the hub: {self._endpoint} answers {status}",
            hint="check the network, and repeat the command: it resumes",
        )


def _wait_s(headers: Message) -> float:
    """Return how long a busy hub asks to wait."""
    text = headers.get("Retry-After", "")
    limit = re.search(r"\bt=(\d+)", headers.get("RateLimit", ""))
    wait = DEFAULT_WAIT_S
    if text.isdigit() or limit:
        wait = float(text if text.isdigit() else limit[1] if limit else 0)
    elif text:
        with suppress(ValueError, TypeError):
            wait = parsedate_to_datetime(text).timestamp() - time()
    return min(max(wait, 0.1), MAX_WAIT_S)


def _read_token() -> str:
    """Return the user's token from where the hub's own client has it, or ""."""
    token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or ""
    if not token:
        path = Path(os.environ.get("HF_TOKEN_PATH") or hub_home() / "token").expanduser()
        with suppress(OSError):
            token = path.read_text()
    return token.strip()


def hub_home() -> Path:
    """Return the folder of the hub's own client, which need not exist."""
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface"
