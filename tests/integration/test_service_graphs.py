"""`dynamo serve`: user services and built-in services as processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until

from dynamo.core.errors import WorkerFailed
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import RuntimeSettings
from dynamo.runtime import Client, DistributedRuntime

EXAMPLES = Path(__file__).parents[2] / "examples"
MOCK = ("--engine.kind", "mock", "--speedup-ratio", "1000")

HELLO = """
import os

from dynamo.sdk import depends, dynamo_endpoint, service


@service(dynamo={"namespace": "hello"}, workers=2)
class Words:
    @dynamo_endpoint()
    async def upper(self, request):
        return {"text": request["text"].upper(), "pid": os.getpid()}

    @dynamo_endpoint()
    async def letters(self, request):
        for letter in request["text"]:
            yield letter


@service(dynamo={"namespace": "hello"})
class Greeter:
    words = depends(Words)

    @dynamo_endpoint()
    async def greet(self, request):
        reply = await self.words.upper({"text": request["name"]})
        letters = [letter async for letter in self.words.letters(request)]
        return reply | {"greeting": self.config.get("greeting", "hello")}

    @dynamo_endpoint()
    async def spell(self, request):
        async for letter in self.words.letters({"text": request["name"]}):
            yield letter
"""


@asynccontextmanager
async def client_of(environ: dict[str, str], deployment: str, path: str) -> AsyncIterator[Client]:
    """A client of an endpoint of another deployment."""
    folder = Path(environ["XDG_RUNTIME_DIR"]) / "dynamo" / deployment / "discovery"
    settings = Settings(runtime=RuntimeSettings(discovery=f"file:{folder}"))
    async with await DistributedRuntime.create(settings) as runtime:
        client = await runtime.endpoint(path).client()
        await client.wait_for_instances(timeout_s=30)
        yield client


async def test_a_service_calls_another_with_two_replicas(
    start: Any, tmp_path: Path, runtime_environ: dict[str, str]
) -> None:
    (tmp_path / "hello.py").write_text(HELLO)
    serve = start(
        *("hello:Greeter", "--Greeter.greeting=good day", "--deployment", "hello"),
        command="serve",
        ready=False,
    )
    await asyncio.to_thread(until, lambda: "Greeter serves" in serve.log.read_text())
    async with client_of(runtime_environ, "hello", "hello.Greeter.greet") as client:
        answers: list[Any] = []
        async with asyncio.timeout(30):  # the second replica may start later than the caller
            while len({answer["pid"] for answer in answers}) < 2:
                answers.append(await client.generate({"name": "ann", "text": "x"}))

        assert {answer["text"] for answer in answers} == {"ANN"}
        assert {answer["greeting"] for answer in answers} == {"good day"}
        pids = {answer["pid"] for answer in answers}

        os.kill(min(pids), signal.SIGKILL)
        await asyncio.to_thread(until, lambda: "process died" in serve.log.read_text())
        with suppress(WorkerFailed):  # the request may go to the killed process
            await client.generate({"name": "bob", "text": "x"})
        after = [await client.generate({"name": "bob", "text": "x"}) for _ in range(20)]
        assert {answer["text"] for answer in after} == {"BOB"}
    async with client_of(runtime_environ, "hello", "hello.Greeter.spell") as client:
        assert [letter async for letter in client.generate({"name": "eve"})] == ["e", "v", "e"]
    assert serve.stop(signal.SIGTERM) == 0


def test_an_example_graph_serves_http_and_each_part_is_a_process(
    start: Any, tiny_model: Path
) -> None:
    serve = start(
        *("graphs.agg_router:Frontend", "-f", "configs/agg_router.yaml", *MOCK),
        *("--model-path", tiny_model, "--model-name", "tiny", "--Router.port=0"),
        command="serve",
        folder=EXAMPLES / "llm",
    )
    body = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
    status, answer = serve.post("/v1/chat/completions", body)

    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
    until(lambda: all(p["state"] == "ready" for p in serve.processes()))
    assert [(p["role"], p["name"]) for p in serve.processes()] == [
        ("supervisor", "supervisor"),
        ("frontend", "Frontend"),
        ("router", "Router"),
        ("worker", "AggregatedWorker-1"),
        ("worker", "AggregatedWorker-2"),
    ]
    assert serve.stop() == 0


def test_parts_of_a_graph_can_be_started_separately(start: Any, tiny_model: Path) -> None:
    common = ("-f", "configs/agg.yaml", *MOCK, "--deployment", "apart", "--only")
    model = ("--model-path", tiny_model, "--model-name", "tiny")
    llm = EXAMPLES / "llm"
    front = start("graphs.agg:Frontend", *common, command="serve", folder=llm, ready=False)
    processor = start("graphs.agg:Processor", *common, command="serve", folder=llm, ready=False)
    worker = start(
        "graphs.agg:AggregatedWorker", *common, *model, command="serve", folder=llm, ready=False
    )
    front.wait_ready()
    body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}

    assert front.post("/v1/chat/completions", body)[0] == 200
    assert worker.get("/health")[0] == processor.get("/health")[0] == 0
    assert front.stop() == 0
    call = ("call", "Processor.chat/answer", json.dumps(body), "--deployment", "apart")
    answer = dynamo(*call, folder=llm, environ=processor.environ).stdout
    assert json.loads(answer)["usage"]["completion_tokens"] == 2
    assert (processor.stop(), worker.stop()) == (0, 0)


def test_a_retrieval_service_stands_between_http_and_the_model(
    start: Any, tiny_model: Path
) -> None:
    serve = start(
        *("retrieval:Frontend", "-f", "retrieval.yaml", *MOCK),
        *("--model-path", tiny_model, "--model-name", "tiny"),
        command="serve",
        folder=EXAMPLES / "retrieval",
    )
    ask = {"max_tokens": 3, "messages": [{"role": "user", "content": "is the museum closed?"}]}
    until(lambda: "with-documents" in serve.get("/v1/models")[1])
    plain = serve.post("/v1/chat/completions", ask | {"model": "tiny"})[1]["usage"]
    augmented = serve.post("/v1/chat/completions", ask | {"model": "with-documents"})[1]["usage"]
    prompt = {"model": "with-documents", "prompt": "is the museum closed?", "max_tokens": 3}
    status, answer = serve.post("/v1/completions", prompt)
    refusal, refused = serve.post("/v1/completions", prompt | {"echo": True})

    assert augmented["prompt_tokens"] > plain["prompt_tokens"] + 20
    assert augmented["completion_tokens"] == plain["completion_tokens"] == 3
    assert (status, answer["usage"]["prompt_tokens"]) == (200, augmented["prompt_tokens"])
    assert (refusal, refused["error"]["code"]) == (400, "unsupported")
    assert serve.post("/v1/chat/completions", ask | {"model": "default"})[1]["model"] == "tiny"


STORY = """
from dynamo.sdk import depends, dynamo_endpoint, service
from dynamo.services import Frontend, Processor, Worker


@service(dynamo={"model": "storyteller"})
class Storyteller:
    processor = depends(Processor)

    @dynamo_endpoint()
    async def chat(self, request):
        yield "Once upon a time: "
        async for chunk in self.processor.chat(request):
            yield chunk
        answer = await self.processor.answer({**request, "max_tokens": 2})
        yield f" ({answer['usage']['completion_tokens']} more)"


Frontend.link(Storyteller)
Frontend.link(Processor).link(Worker)
"""


def test_a_service_adds_text_to_the_models_stream(
    start: Any, tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / "story.py").write_text(STORY)
    serve = start("story:Frontend", *MOCK, "--Worker.model.path", tiny_model, command="serve")
    until(lambda: "storyteller" in serve.get("/v1/models")[1])
    ask = {"model": "storyteller", "messages": [{"role": "user", "content": "hi"}]}
    status, answer = serve.post("/v1/chat/completions", ask | {"max_tokens": 5})

    text = answer["choices"][0]["message"]["content"]
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
    assert text.startswith("Once upon a time: ")
    assert text.endswith(" (2 more)")
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["prompt_tokens"] > 0
    status, answer = serve.post("/v1/chat/completions", ask | {"temperature": 9})
    assert (status, answer["error"]["param"]) == (400, "temperature")


def dynamo(
    *arguments: str, folder: Path, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dynamo", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=environ
    )


def test_a_dry_run_lists_processes_and_planes() -> None:
    arguments = ("serve", "retrieval:Frontend", "-f", "retrieval.yaml", "--dry-run")
    shown = dynamo(*arguments, "--Documents.workers=3", folder=EXAMPLES / "retrieval").stdout

    assert [line.split()[:2] for line in shown.splitlines()[1:5]] == [
        ["Frontend", "1"],
        ["Retrieval", "1"],
        ["Documents", "3"],
        ["Worker", "1"],
    ]
    assert "http        http://127.0.0.1:8000" in shown
    assert "requests    tcp://127.0.0.1:0" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["graphs.disag:Frontend"], "did you mean 'graphs.disagg'?"),
        (["graphs.agg:Fronted"], "did you mean 'Frontend'?"),
        (["graphs.agg"], "write MODULE:Service"),
        (["graphs.agg:Frontend", "--AggregatedWorker.knd=mock"], "did you mean 'kind'?"),
        (["graphs.agg:Frontend", "--Aggregated.kind=mock"], "did you mean 'AggregatedWorker'?"),
        (["graphs.agg:Frontend", "--engine.kind", "vllm"], "vllm"),
    ],
)
def test_a_wrong_argument_is_reported_with_a_suggestion(arguments: list[str], message: str) -> None:
    ended = dynamo("serve", *arguments, folder=EXAMPLES / "llm")

    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
