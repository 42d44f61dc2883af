"""A server with the part of the interfaces of Google Cloud Storage and Azure Blob Storage that a
client needs to list a folder and read its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.http_threads import serving

BUCKET = "models"
MODIFIED = "Mon, 02 Nov 2026 10:00:00 GMT"
HTTP_OK, HTTP_PARTIAL, HTTP_FORBIDDEN, HTTP_NOT_FOUND, HTTP_CHANGED = 200, 206, 403, 404, 412


class FakeBuckets(ThreadingHTTPServer):
    """Serves `objects` by key, all of one bucket. `refuses`: no client has a right."""

    daemon_threads = True

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects = objects
        self.refuses = False

    @property
    def environ(self) -> dict[str, str]:
        """Variables for clients of both kinds."""
        url = f"http://127.0.0.1:{self.server_port}"
        key = {"client_email": "", "private_key": "", "private_key_id": "", "disable_oauth": True}
        return {
            "GOOGLE_BASE_URL": url,
            "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key | {"gcs_base_url": url}),
            "AZURE_STORAGE_ENDPOINT": url,
            "AZURE_STORAGE_ACCOUNT_NAME": "account",
            "AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0",
        }


class _Handler(BaseHTTPRequestHandler):
    server: FakeBuckets
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Write nothing."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if self.server.refuses:
            self._send(HTTP_FORBIDDEN, b"")
        elif bucket != BUCKET:
            is_azure = query.get("comp") == "list"
            code = "ContainerNotFound" if is_azure else "NoSuchBucket"
            self._send(HTTP_NOT_FOUND, f"<Error><Code>{code}</Code></Error>".encode())
        elif not key:
            self._list(query.get("prefix", ""), is_azure=query.get("comp") == "list")
        else:
            self._read(key)

    def _list(self, prefix: str, *, is_azure: bool) -> None:
        listed = {key: data for key, data in self.server.objects.items() if key.startswith(prefix)}
        if is_azure:
            blobs = "".join(
                f"<Blob><Name>{key}</Name><Properties><Last-Modified>{MODIFIED}</Last-Modified>"
                f"<Content-Length>{len(data)}</Content-Length><Content-Type>x</Content-Type>"
                f"<Etag>{_tag(data)}</Etag></Properties></Blob>"
                for key, data in listed.items()
            )
            text = f"<EnumerationResults><Blobs>{blobs}</Blobs></EnumerationResults>"
        else:
            contents = "".join(
                f"<Contents><Key>{key}</Key><LastModified>2026-11-02T10:00:00.000Z</LastModified>"
                f"<ETag>{_tag(data)}</ETag><Size>{len(data)}</Size></Contents>"
                for key, data in listed.items()
            )
            text = f"<ListBucketResult>{contents}</ListBucketResult>"
        self._send(HTTP_OK, text.encode())

    def _read(self, key: str) -> None:
        data = self.server.objects.get(key)
        if data is None:
            self._send(HTTP_NOT_FOUND, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        if self.headers.get("If-Match", _tag(data)) != _tag(data):
            self._send(HTTP_CHANGED, b"")
            return
        span = self.headers.get("Range") or self.headers.get("x-ms-range") or "bytes=0-"
        start, _, end = span.removeprefix("bytes=").partition("-")
        first, last = int(start), min(int(end or len(data)), len(data) - 1)
        headers = {"Content-Range": f"bytes {first}-{last}/{len(data)}", "ETag": _tag(data)}
        self._send(HTTP_PARTIAL, data[first : last + 1], headers | {"Last-Modified": MODIFIED})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _tag(data: bytes) -> str:
    return f'"{hashlib.sha256(data).hexdigest()[:32]}"'


@contextmanager
def running_buckets(objects: dict[str, bytes]) -> Iterator[FakeBuckets]:
    """Serve until the block ends."""
    with serving(FakeBuckets(objects)) as server:
        yield server
