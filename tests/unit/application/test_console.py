"""The console: its files, what guards them, and where browsers are led to."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo.application.app import RouterApplication
from dynamo.application.console.handler import (
    CONSOLE_PATH,
    ConsoleHandler,
    DeploymentStream,
    console_files,
)
from dynamo.application.exchange import Exchange
from dynamo.application.front_page import FrontPage, LocateConsole
from dynamo.communication.addresses import url_for_browser
from dynamo.communication.http import HttpLimits, HttpServer, Request, Response
from dynamo.core.clock import SystemClock
from dynamo.core.errors import Forbidden, NotFound
from dynamo.core.settings.schema import ServerSettings
from dynamo.telemetry.metrics import Registry

FRONTEND = "http://0.0.0.0:8000"


class Source:
    """A deployment of one frontend."""

    frontends = (FRONTEND,)

    async def show_deployment(self) -> Mapping[str, Any]:
        return {"deployment": "mine"}

    async def read_logs(self, process: str) -> Sequence[str]:
        return (f"a line of {process}",)

    async def list_settings(self) -> Any:
        return ()


class Recorder(SimpleNamespace):
    """A response that keeps what is sent, and takes so many events of a stream."""

    started = False
    room = 2
    body = b""

    def start(self, status: int, headers: Any) -> None:
        self.status, self.headers, self.body, self.started = status, dict(headers), b"", True

    def write(self, data: bytes) -> bool:
        self.room -= 1
        self.body += data if self.room >= 0 else b""
        return self.room >= 0

    def end(self) -> None:
        self.room = 0

    def events(self) -> list[Any]:
        return [msgspec.json.decode(line[6:]) for line in self.body.splitlines() if line]

    def send(self, status: int, headers: Any, body: bytes) -> None:
        self.status, self.headers, self.body = status, dict(headers), body


async def ask(path: str, *, keys: tuple[str, ...] = (), **headers: str) -> Recorder:
    console = ConsoleHandler(Source())
    application = RouterApplication(
        ServerSettings(api_keys=keys),
        "127.0.0.1",
        console.routes(),
        SystemClock(),
        Registry(),
        reasons=dict,
        facts=dict,
        page_path=CONSOLE_PATH,
        open_pages=console.pages(),
    )
    named = {"host": "127.0.0.1:9000"} | headers
    request = Request(
        "GET", path.encode(), {name.encode(): value.encode() for name, value in named.items()}
    )
    application.check_headers(request)
    response = Recorder()
    await application.handle(request, response)  # type: ignore[arg-type]
    return response


async def test_the_page_and_all_that_it_names_are_served() -> None:
    page = await ask(CONSOLE_PATH)
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert policy.endswith("connect-src 'self' http://127.0.0.1:8000")
    names = re.findall(r'"console/([\w.]+)"', page.body.decode())
    assert names
    for name in names:
        file = await ask(f"{CONSOLE_PATH}/{name}")
        assert file.status == 200
        names += set(re.findall(r'from "\./([\w.]+)"', file.body.decode())) - {*names}
    assert {*names, "console.html"} == {*console_files()}


@pytest.mark.parametrize("name", ["x.js", "../handler.py", "..%2fhandler.py", "__init__.py"])
async def test_no_other_file_is_served(name: str) -> None:
    assert (await ask(f"{CONSOLE_PATH}/{name}")).status == 404


@pytest.mark.parametrize("name", sorted(console_files()))
def test_no_file_turns_text_into_markup_or_calls_another_server(name: str) -> None:
    text = console_files()[name][1].decode()
    unsafe = r"(inner|outer)HTML|insertAdjacent|document\.write|\beval\b|Function\(|srcdoc| style=| on\w+=\""
    assert not re.search(unsafe, text)
    assert set(re.findall(r"https?://[^\"` ]+", text)) <= {"http://www.w3.org/2000/svg"}


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("name", [name for name in sorted(console_files()) if name[-3:] == ".js"])
def test_each_module_can_be_parsed(name: str) -> None:
    command = ["node", "--input-type=module", "--check"]
    subprocess.run(command, input=console_files()[name][1], check=True, capture_output=True)


@pytest.mark.parametrize("path", ["/logs/worker-1", "/settings"])
async def test_data_need_a_key_and_the_page_does_not(path: str) -> None:
    assert (await ask(path)).status == 200
    assert (await ask(path, keys=("a",))).status == 401
    assert (await ask(path, keys=("a",), authorization="Bearer a")).status == 200
    assert (await ask(CONSOLE_PATH, keys=("a",))).status == 200
    for headers in ({"origin": "https://evil.example"}, {"host": "evil.example:9000"}):
        with pytest.raises(Forbidden):
            await ask(path, **headers)


async def test_data_are_those_of_the_source() -> None:
    logs = msgspec.json.decode((await ask("/logs/worker-1")).body)
    assert logs == {"process": "worker-1", "lines": ["a line of worker-1"]}


class Viewers:
    """A stream of a deployment, whose state tests set, and its viewers."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"at": 1, "workers": {"a": (1, 2), "b": (0, 0)}, "slow": ()}
        self.reads = 0
        self.stream = DeploymentStream(self.read)

    async def read(self) -> dict[str, Any]:
        self.reads += 1
        return self.state

    async def add(self, room: int = 100) -> tuple[asyncio.Task[None], Recorder]:
        response = Recorder(room=room)
        request = Request("GET", b"/deployment", {})
        exchange = Exchange(request, response, "id", "id", ())  # type: ignore[arg-type]
        task = asyncio.ensure_future(self.stream.serve(exchange, lambda: {"read": self.reads}))
        while not response.body and not task.done():
            await asyncio.sleep(0)
        return task, response


async def test_viewers_get_the_deployment_and_then_what_changes() -> None:
    viewers = Viewers()
    await viewers.stream.update()
    assert viewers.reads == 0  # nobody looks
    first, early = await viewers.add()
    whole = msgspec.to_builtins(viewers.state)
    viewers.state = {"at": 2, "workers": {"a": (1, 2), "c": (5, 0)}, "slow": ()}
    await viewers.stream.update()
    second, late = await viewers.add()
    viewers.state = viewers.state | {"at": 3, "slow": ("x",)}
    await viewers.stream.update()
    assert viewers.reads == 3
    change = {"at": 2, "workers": {"b": None, "c": [5, 0]}}
    assert early.events()[:3] == [
        {"read": 1},  # the reading that the client begins with knows the frontends
        msgspec.json.decode(msgspec.json.encode(whole)),
        change,
    ]
    assert late.events()[1]["workers"] == {"a": [1, 2], "c": [5, 0]}
    assert early.events()[3] == late.events()[2] == {"at": 3, "slow": ["x"]}
    first.cancel()
    await viewers.stream.close()
    await second
    await viewers.stream.update()
    assert viewers.reads == 3


async def test_a_viewer_that_never_reads_is_dropped() -> None:
    viewers = Viewers()
    slow, _ = await viewers.add(room=2)
    reader, _ = await viewers.add()
    await viewers.stream.update()
    await slow
    assert not reader.done()
    reader.cancel()


async def test_a_client_that_never_reads_fills_its_backlog_only() -> None:
    viewers, ended = Viewers(), asyncio.Event()

    async def handle(request: Request, response: Response) -> None:
        try:
            await viewers.stream.serve(Exchange(request, response, "id", "id", ()), dict)
        finally:
            ended.set()

    settings = ServerSettings(stream_backlog_bytes=1 << 20)
    server = HttpServer(handle, HttpLimits.without_bodies(settings), SystemClock())
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(b"GET /deployment HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readline()
    for number in range(400):  # the kernel takes some megabytes
        viewers.state = viewers.state | {"at": number, "blob": f"{number:0100000d}"}
        await viewers.stream.update()
        await asyncio.sleep(0)
        if ended.is_set():
            break
    assert ended.is_set()
    writer.close()
    await server.stop(0)


@pytest.mark.parametrize(
    ("url", "host", "shown"),
    [
        ("http://127.0.0.1:9000", "localhost:8000", "http://127.0.0.1:9000"),
        ("http://127.0.0.1:9000", "llm.example:8000", ""),
        ("http://0.0.0.0:9000", "llm.example:8000", "http://llm.example:9000"),
        ("http://[::]:9000", "[2001:db8::1]:8000", "http://[2001:db8::1]:9000"),
        ("http://10.0.0.2:9000", "llm.example", "http://10.0.0.2:9000"),
        ("http://0.0.0.0:9000", "evil.example; script-src *", ""),
        ("http://0.0.0.0:9000", "", ""),
    ],
)
def test_a_browser_gets_a_url_that_it_reaches(url: str, host: str, shown: str) -> None:
    assert url_for_browser(url, host) == shown


async def lead(locate: LocateConsole, host: str, query: str = "") -> Recorder:
    headers = {b"accept": b"text/html", b"host": host.encode()}
    request = Request("GET", b"/" + query.encode(), headers)
    response = Recorder()

    def send(content_type: str, body: bytes) -> None:
        response.send(200, (("content-type", content_type),), body)

    exchange = SimpleNamespace(request=request, response=response, headers=(), send=send)
    await FrontPage({}, locate_console=locate).show(exchange)  # type: ignore[arg-type]
    return response


async def test_browsers_get_from_a_frontend_to_the_console() -> None:
    async def local() -> str:
        return "http://127.0.0.1:9000"

    async def none() -> str:
        raise NotFound("no observer runs")

    led = await lead(local, "localhost:8000")
    assert (led.status, led.headers["location"]) == (303, "http://127.0.0.1:9000/console")
    for locate, host, query in (
        (local, "llm.example:8000", ""),
        (none, "localhost:8000", ""),
        (local, "localhost:8000", "?page"),
    ):
        page = await lead(locate, host, query)
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
