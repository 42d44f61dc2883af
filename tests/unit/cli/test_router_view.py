"""`dynamo router` before servers that answer as a frontend does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from dynamo.cli import main
from dynamo.cli.router import format_report, run
from dynamo.core.errors import ConfigError, InvalidRequest


class Refusing(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        error = {"message": "seconds: a number, not 'nan'", "param": "seconds", "hint": None}
        body = json.dumps({"error": error}).encode()
        self.send_response(400 if self.path.startswith("/router/report") else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


Serving = Callable[[type[BaseHTTPRequestHandler]], str]


@pytest.fixture
def serving() -> Iterator[Serving]:
    """`url = serving(Handler)`."""
    with ExitStack() as opened:

        def serve(handler: type[BaseHTTPRequestHandler]) -> str:
            server = opened.enter_context(HTTPServer(("127.0.0.1", 0), handler))
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            opened.callback(thread.join)
            opened.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}"

        yield serve


@pytest.fixture
def refusing(serving: Serving) -> str:
    return serving(Refusing)


def test_what_the_server_says_is_told(refusing: str) -> None:
    with pytest.raises(InvalidRequest, match="a number, not 'nan'"):
        run(["report", "--seconds", "nan", "--url", refusing])


def test_who_has_no_key_is_told_how_to_give_one(
    refusing: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DYNAMO_API_KEY", raising=False)
    for command in (["explain", "--url", refusing], ["chat", refusing]):
        assert main(command) == 1
        assert "hint: --api-key KEY, or $DYNAMO_API_KEY" in capsys.readouterr().err


class Strange(BaseHTTPRequestHandler):
    """Something else that speaks JSON."""

    def do_GET(self) -> None:
        self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n{}")


def test_an_answer_of_somebody_else_is_told_without_a_traceback(
    serving: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    strange = serving(Strange)
    for command in (["explain"], ["router", "report"], ["router", "view"]):
        assert main([*command, "--url", strange]) == 1
        assert "is no answer of ours" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--html", "--picture"])
def test_where_nothing_can_be_written_nobody_is_asked(flag: str, tmp_path: Path) -> None:
    nobody = "http://127.0.0.1:1"
    for path in (tmp_path, tmp_path / "none" / "a.png"):
        with pytest.raises(ConfigError, match="cannot write"):
            run(["view", flag, str(path), "--url", nobody])


@pytest.mark.parametrize("url", ["ftp://x", "http://", "nonsense://", "http:///v1"])
def test_what_is_no_url_is_told(url: str) -> None:
    with pytest.raises(ConfigError, match="is no URL"):
        run(["report", "--url", url])


def test_a_report_of_nothing_says_so() -> None:
    parts: dict[str, dict[str, float]] = {"latency": {}, "cache_hit": {}, "load_balance": {}}
    report = {"aggregated_metrics": parts | {"throughput": {"requests": 0.0}}}
    assert format_report(report) == "no request was routed in that time"


def test_a_url_may_lack_its_scheme(refusing: str) -> None:
    with pytest.raises(InvalidRequest, match="a number"):
        run(["report", "--seconds", "nan", "--url", refusing.removeprefix("http://")])
