"""`dynamo router` and `dynamo explain` with fake servers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from tests.support.http_threads import serving

from dynamo.cli import main
from dynamo.cli.router import format_report, run
from dynamo.core.errors import ConfigError, InvalidRequest


class ErrorHandler(BaseHTTPRequestHandler):
    """Answers 400 to a report and 401 to all else."""

    def do_GET(self) -> None:
        error = {"message": "seconds: a number, not 'nan'", "param": "seconds", "hint": None}
        body = json.dumps({"error": error}).encode()
        self.send_response(400 if self.path.startswith("/router/report") else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


ServeHandler = Callable[[type[BaseHTTPRequestHandler]], str]


@pytest.fixture
def serve_handler() -> Iterator[ServeHandler]:
    """Return a function that starts a server with a handler and returns its URL."""
    with ExitStack() as stack:

        def start(handler: type[BaseHTTPRequestHandler]) -> str:
            server = stack.enter_context(serving(HTTPServer(("127.0.0.1", 0), handler)))
            return f"http://127.0.0.1:{server.server_port}"

        yield start


@pytest.fixture
def error_url(serve_handler: ServeHandler) -> str:
    return serve_handler(ErrorHandler)


def test_the_error_of_the_server_is_raised(error_url: str) -> None:
    with pytest.raises(InvalidRequest, match="a number, not 'nan'"):
        run(["report", "--seconds", "nan", "--url", error_url])


def test_the_hint_of_401_names_the_api_key_flag(
    error_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DYNAMO_API_KEY", raising=False)
    for command in (["explain", "--url", error_url], ["chat", error_url]):
        assert main(command) == 1
        assert "hint: --api-key KEY, or $DYNAMO_API_KEY" in capsys.readouterr().err


class ForeignHandler(BaseHTTPRequestHandler):
    """Answers with JSON of another application."""

    def do_GET(self) -> None:
        self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n{}")


def test_a_response_of_another_application_is_an_error_without_a_traceback(
    serve_handler: ServeHandler, capsys: pytest.CaptureFixture[str]
) -> None:
    url = serve_handler(ForeignHandler)
    for command in (["explain"], ["router", "report"], ["router", "view"]):
        assert main([*command, "--url", url]) == 1
        assert "is not a response of dynamo" in capsys.readouterr().err


class TimelineHandler(BaseHTTPRequestHandler):
    """Answers with a timeline without samples."""

    def do_GET(self) -> None:
        self.wfile.write(b'HTTP/1.0 200 OK\r\n\r\n{"at": [], "workers": {}}')


def test_view_opens_the_console_of_the_observer(
    serve_handler: ServeHandler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    url = serve_handler(TimelineHandler)
    assert main(["router", "view", "--json", "--url", url]) == 0
    assert main(["router", "view", "--url", url]) == 0
    assert opened == [f"{url}/console#workers"]
    assert capsys.readouterr().out == f'{{"at":[],"workers":{{}}}}\n{url}/console#workers\n'


@pytest.mark.parametrize("url", ["ftp://x", "http://", "nonsense://", "http:///v1"])
def test_an_invalid_url_is_rejected(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a URL"):
        run(["report", "--url", url])


def test_a_report_without_requests() -> None:
    parts: dict[str, dict[str, float]] = {"latency": {}, "cache_hit": {}, "load_balance": {}}
    report = {"aggregated_metrics": parts | {"throughput": {"requests": 0.0}}}
    assert format_report(report) == "no request was routed in that time"


def test_a_url_may_lack_its_scheme(error_url: str) -> None:
    with pytest.raises(InvalidRequest, match="a number"):
        run(["report", "--seconds", "nan", "--url", error_url.removeprefix("http://")])
