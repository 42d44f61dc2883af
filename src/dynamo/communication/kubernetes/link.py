"""Requests to the API server of a Kubernetes cluster, from a pod or through `kubectl proxy`."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from dynamo.communication.addresses import bracket_ipv6, is_loopback
from dynamo.communication.http.client import HttpAnswer, HttpClient
from dynamo.communication.outage_log import OutageLog
from dynamo.core.errors import PlaneUnavailable
from dynamo.core.host.parent_death_signal import dying_with_parent
from dynamo.core.redaction import remember_secrets

ACCOUNT_FOLDER: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
ACCOUNT_FOLDER_VARIABLE: Final = "DYN_SERVICE_ACCOUNT_FOLDER"
REREAD_S: Final = 60.0
"""The service account's token and CA are read again so often, and when a token is refused."""
PROXY_START_S: Final = 10.0
MERGE_PATCH: Final = "application/merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"
JSON: Final = "application/json"
UNAUTHORIZED: Final = 401
FORBIDDEN: Final = 403
NOT_FOUND: Final = 404
CONFLICT: Final = 409
INVALID: Final = 422
OnLine = Callable[[bytes], None]


class ApiServerError(PlaneUnavailable):
    """The API server answered with a failure. `status` is the HTTP status, `details` those of the
    `Status` object, and `retry_after_s` what the server asks to wait."""

    def __init__(
        self, message: str, status: int, details: Mapping[str, Any], retry_after_s: float | None
    ) -> None:
        hint = ""
        if status == UNAUTHORIZED:
            hint = "log in again: the token has expired, or is of another cluster"
        elif "dial tcp" in message:  # by `kubectl proxy`
            hint = "does `kubectl version` reach the cluster? KUBECONFIG names the file"
        super().__init__(message, hint=hint, retry_after_s=retry_after_s)
        self.status = status
        self.details = details


class AllowedStatuses:
    """A block that ends without an error if the API server answers with one of `statuses`."""

    def __init__(self, *statuses: int) -> None:
        self._statuses = statuses

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return isinstance(error, ApiServerError) and error.status in self._statuses


class KubernetesLink:
    """Sends requests to an API server. All raise `ApiServerError` for an answer that is a failure,
    and `PlaneUnavailable` if the server cannot be reached. `server` names it in messages, and
    `namespace` is that of the pod's service account, else "default"."""

    def __init__(self, server: str, timeout_s: float) -> None:
        self.server = server
        self.outage_log = OutageLog("Kubernetes", server)
        self.namespace = "default"
        self._timeout_s = timeout_s
        self._client: HttpClient | None = None

    async def request(
        self, method: str, path: str, body: Any = None, *, content_type: str = JSON
    ) -> bytes:
        """Send a request with a JSON body, and return the body of the answer."""
        data = b"" if body is None else msgspec.json.encode(body)
        content = bytearray()

        def on_data(part: bytes) -> bool:
            content.extend(part)
            return True

        answer = await self._send(
            method, path, data, on_data, content_type=content_type, timeout_s=self._timeout_s
        )
        return bytes(content) or answer.body

    async def stream(self, path: str, on_line: OnLine, timeout_s: float) -> None:
        """Call `on_line` with each line of an answer, as it arrives, until the server ends it, or
        sends nothing for `timeout_s`."""
        rest = b""

        def on_data(part: bytes) -> bool:
            nonlocal rest
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                on_line(line)
            return True

        await self._send("GET", path, b"", on_data, content_type=JSON, timeout_s=timeout_s)

    async def served_version(self, group: str, known: Sequence[str]) -> str:
        """Return the first of the `known` versions of an API group that the server has."""
        document = msgspec.json.decode(await self.request("GET", f"/apis/{group}"), type=_Group)
        served = {version.version for version in document.versions}
        for version in known:
            if version in served:
                return version
        raise PlaneUnavailable(
            f"Kubernetes at {self.server} has {group} as {', '.join(sorted(served)) or 'nothing'}, "
            f"and {' or '.join(known)} is needed"
        )

    async def close(self) -> None:
        """Close all connections. Requests in progress fail."""
        if self._client is not None:
            self._client.close()

    async def _send(
        self,
        method: str,
        path: str,
        data: bytes,
        on_data: Callable[[bytes], bool],
        *,
        content_type: str,
        timeout_s: float,
    ) -> HttpAnswer:
        """Send a request, once more if its token is refused. `timeout_s` is the longest time
        without a part of the answer."""
        loop = asyncio.get_running_loop()
        for fresh in (False, True):
            try:
                async with asyncio.timeout(timeout_s) as limit:

                    def on_part(part: bytes, limit: asyncio.Timeout = limit) -> bool:
                        limit.reschedule(loop.time() + timeout_s)
                        return on_data(part)

                    client, authorization = await self._prepare(fresh=fresh)
                    answer = await client.send(
                        method, path, data, on_part,
                        authorization=authorization, content_type=content_type,
                    )  # fmt: skip
            except (OSError, TimeoutError) as error:
                reason = str(error) or f"no answer within {timeout_s:g} s"
                raise PlaneUnavailable(f"Kubernetes at {self.server}: {reason}") from None
            if answer.status != UNAUTHORIZED or fresh:
                break
        if answer.status >= 300:
            raise _failure(answer, f"{method} {path.partition('?')[0]}")
        return answer

    async def _prepare(self, *, fresh: bool) -> tuple[HttpClient, str]:
        """Return the client and the authorization for a request. `fresh`: the last one was
        refused."""
        raise NotImplementedError


class AccountLink(KubernetesLink):
    """The link of a pod: the service account's token and CA are read from their folder."""

    def __init__(self, host: str, port: str, folder: Path, timeout_s: float) -> None:
        super().__init__(f"{bracket_ipv6(host)}:{port}", timeout_s)
        self._host = host
        self._folder = folder
        self._authorization = ""
        self._ca = b""
        self._read_s = 0.0
        with suppress(OSError):
            self.namespace = (folder / "namespace").read_text(encoding="utf-8").strip()

    async def _prepare(self, *, fresh: bool) -> tuple[HttpClient, str]:
        now = time.monotonic()
        if fresh or self._client is None or now > self._read_s + REREAD_S:
            self._read()
            self._read_s = now
        assert self._client is not None  # noqa: S101
        return self._client, self._authorization

    def _read(self) -> None:
        """Read the token, and the CA. A new CA closes the connections."""
        try:
            token = (self._folder / "token").read_text(encoding="ascii").strip()
            path = self._folder / "ca.crt"
            ca = path.read_bytes() if path.exists() else b""
        except (OSError, ValueError) as error:
            if self._client is None:
                raise OSError(f"the service account cannot be read: {error}") from None
            return  # the files are replaced just now
        remember_secrets((token,))
        self._authorization = f"Bearer {token}"
        if self._client is None or ca != self._ca:
            if self._client is not None:
                self._client.close()
            self._ca = ca
            self._client = self._connect(ca)

    def _connect(self, ca: bytes) -> HttpClient:
        """Return a client that trusts a CA. Without one the server must be on this host, since the
        token would go over the network in the clear."""
        if not ca:
            if not is_loopback(self._host):
                raise OSError(f"{self._folder} has no ca.crt, so the server cannot be verified")
            return HttpClient(f"http://{self.server}", {}, None)
        context = ssl.create_default_context(cadata=ca.decode("ascii"))
        return HttpClient(f"https://{self.server}", {}, context)


class ProxyLink(KubernetesLink):
    """The link of a process outside of a cluster: a `kubectl proxy`, which has the user's
    kubeconfig, is started with the first request and ends with this process."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__("kubectl proxy", timeout_s)
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def _prepare(self, *, fresh: bool) -> tuple[HttpClient, str]:
        del fresh
        async with self._lock:
            if self._process is None or self._process.returncode is not None or not self._client:
                self._client = HttpClient(await self._start(), {}, None)
            return self._client, ""

    async def _start(self) -> str:
        """Start `kubectl proxy` and return its URL. Raises `OSError`."""
        if shutil.which("kubectl") is None:
            raise OSError("this process has no pod's service account, and finds no kubectl")
        self._process = process = await asyncio.create_subprocess_exec(
            *dying_with_parent(["kubectl", "proxy", "--port=0"]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert process.stdout is not None  # noqa: S101
        async with asyncio.timeout(PROXY_START_S):
            text = (await process.stdout.readline()).decode(errors="replace").strip()
        address = text.rpartition(" ")[2]
        if not text.startswith("Starting to serve on"):
            with suppress(ProcessLookupError):
                process.kill()
            raise OSError(f"kubectl proxy: {text or 'no output'}")
        return f"http://{address}"

    async def close(self) -> None:
        await super().close()
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


def open_link(timeout_s: float, environ: Mapping[str, str] | None = None) -> KubernetesLink:
    """Return the link of a pod if this process has a service account, else that of a proxy."""
    environ = os.environ if environ is None else environ
    folder = Path(environ.get(ACCOUNT_FOLDER_VARIABLE) or ACCOUNT_FOLDER)
    host = environ.get("KUBERNETES_SERVICE_HOST", "")
    if host and (folder / "token").exists():
        port = environ.get("KUBERNETES_SERVICE_PORT") or "443"
        return AccountLink(host, port, folder, timeout_s)
    return ProxyLink(timeout_s)


class _Version(msgspec.Struct, frozen=True):
    version: str


class _Group(msgspec.Struct, frozen=True):
    versions: list[_Version]


class _Status(msgspec.Struct, frozen=True):
    message: str = ""
    details: dict[str, Any] | None = None


def _failure(answer: HttpAnswer, request: str) -> ApiServerError:
    """Return the error for an answer that is none of success."""
    try:
        status = msgspec.json.decode(answer.body, type=_Status)
    except msgspec.DecodeError:
        status = _Status(answer.body[:200].decode(errors="replace").strip())
    text = status.message or "no reason given"
    if answer.status == 404 and "/apis/nvidia.com/" in request and not status.details:
        text += "; are Dynamo's kinds installed? `dynamo kubernetes crds` prints them"
    seconds = answer.headers.get("retry-after", "")
    return ApiServerError(
        f"Kubernetes answered {answer.status} to {request}: {text}",
        answer.status,
        status.details or {},
        float(seconds) if seconds.isdigit() else None,
    )
