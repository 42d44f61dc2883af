"""The path of a request through the eight files that docs/architecture.md names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

import dynamo
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import (
    EngineSettings,
    ModelSettings,
    RuntimeSettings,
    ServerSettings,
)
from dynamo.runtime import DistributedRuntime
from dynamo.services.frontend import FrontendService
from dynamo.services.worker import WorkerService

WALK = [
    "application/openai/chat.py",
    "application/gateway.py",
    "scheduling/processor/chat_processor.py",
    "scheduling/pipeline.py",
    "scheduling/router/router.py",
    "scheduling/dispatch.py",
    "communication/requests/tcp.py",
    "inference/worker.py",
]
ROOT = str(Path(dynamo.__file__).parent) + "/"


@contextmanager
def traced(files: list[str]) -> Iterator[None]:
    """Append each file of WALK when one of its functions is first called."""

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            name = frame.f_code.co_filename.removeprefix(ROOT)
            if name in WALK and name not in files:
                files.append(name)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def settings_of(model: Path, state: Path) -> Settings:
    return Settings(
        server=ServerSettings(http_port=0),
        model=ModelSettings(path=str(model), names=("tiny",)),
        engine=EngineSettings(kind="mock", speedup_ratio=1000),
        runtime=RuntimeSettings(discovery=f"file:{state}"),
    )


async def ask(url: str, body: dict[str, Any]) -> bytes:
    import asyncio

    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = msgspec.json.encode(body)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_a_request_passes_the_eight_files_in_order(tiny_model: Path, tmp_path: Path) -> None:
    settings = settings_of(tiny_model, tmp_path / "state")
    files: list[str] = []
    async with (
        await DistributedRuntime.create(settings, role="worker") as worker,
        await DistributedRuntime.create(settings, role="frontend") as frontend,
    ):
        await WorkerService().attach(worker)
        await FrontendService().attach(frontend)
        while not frontend.health.healthy:
            await frontend.clock.sleep(0.02)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        with traced(files):
            answer = await ask(frontend.public_address, body)
    assert b"200 OK" in answer
    assert b'"completion_tokens":3' in answer
    assert files == WALK


def test_the_document_names_the_same_files() -> None:
    document = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    named = [
        line.split("`")[1]
        for line in document.splitlines()
        if line.startswith("| ") and "| `" in line and line[2].isdigit()
    ]
    assert named == WALK
    assert all((Path(ROOT) / name).exists() for name in WALK)
