"""Programs in the forms of NVIDIA Dynamo's examples, behind a frontend of this project.

The frontend and the programs share a process and memory planes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.support.servers import free_port

from dynamo import llm
from dynamo._core import load_name
from dynamo.communication.http.client import HttpClient
from dynamo.core.errors import ConfigError, ModelUnavailable, Unsupported
from dynamo.core.settings import Settings
from dynamo.core.tasks import BackgroundTasks
from dynamo.llm import HttpAsyncEngine, HttpError, HttpService, ModelInput, ModelType, WorkerType
from dynamo.llm import exceptions as llm_exceptions
from dynamo.runtime import Context, DistributedRuntime, dynamo_worker
from dynamo.services.frontend import FrontendService

CHAT = "/v1/chat/completions"


@pytest.fixture
def planes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    url = f"memory:{tmp_path}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("DYNAMO_RUNTIME__DISCOVERY", url)
    monkeypatch.setenv("DYNAMO_RUNTIME__REQUESTS", "memory:")
    monkeypatch.setenv("DYNAMO_RUNTIME__EVENTS", "memory:")
    monkeypatch.setattr("dynamo.runtime.component.WITHDRAW_GRACE_S", 0.0)
    return url


@pytest.fixture
async def frontend(planes: str) -> AsyncIterator[HttpClient]:
    """A client of a frontend without workers of its own."""
    base = Settings()
    runtime = replace(base.runtime, discovery=planes, requests="memory:", events="memory:")
    settings = replace(base, runtime=runtime, server=replace(base.server, http_port=0))
    async with await DistributedRuntime.create(settings, role="frontend") as process:
        await FrontendService().attach(process)
        client = HttpClient(process.public_address, {}, None)
        yield client
        client.close()


@pytest.fixture
async def runtime(planes: str) -> AsyncIterator[Any]:
    """The runtime of a program."""
    runtime: Any = DistributedRuntime(asyncio.get_running_loop(), "etcd", False)  # type: ignore[call-arg, arg-type]
    yield runtime
    runtime.shutdown()
    await runtime.closed.wait()


async def ask(client: HttpClient, path: str, **body: Any) -> tuple[int, str]:
    """Return status and body of a POST."""
    answer = await client.send("POST", path, msgspec.json.encode(body))
    return answer.status, answer.body.decode()


async def chat(client: HttpClient, model: str, text: str = "hi", **body: Any) -> tuple[int, Any]:
    """Return the status of a chat, and its message's text or its error."""
    messages = [{"role": "user", "content": text}]
    status, answer = await ask(client, CHAT, model=model, messages=messages, **body)
    decoded = msgspec.json.decode(answer)
    if status != 200:
        return status, decoded["error"]["message"]
    return status, decoded["choices"][0]["message"]["content"]


async def until_served(client: HttpClient, *models: str) -> None:
    """Wait until the frontend serves these models."""
    async with asyncio.timeout(20):
        while True:
            with suppress(OSError):  # nothing listens yet
                answer = await client.send("GET", "/v1/models", b"")
                served = msgspec.json.decode(answer.body).get("data", [])
                if {model["id"] for model in served} >= set(models):
                    return
            await asyncio.sleep(0.01)


class Stage:
    """A private stage of a workflow."""

    def __init__(self, text: str) -> None:
        self._text = text

    async def generate(self, request: Any, context: Context) -> AsyncIterator[dict[str, str]]:
        assert context.id().endswith(self._text)
        yield {"text": self._text}


class Workflow:
    """Asks its stages at once and answers with both texts, unless its caller leaves."""

    def __init__(self, clients: dict[str, Any]) -> None:
        self._clients = clients
        self.begun = asyncio.Event()
        self.left = asyncio.Event()

    async def _ask(self, name: str, request: Any, context: Context) -> str:
        stage_context = context.detached(f"{context.id()}:{name}")
        call = self._clients[name].round_robin
        stream = await call(request, annotated=False, context=stage_context)
        return "".join([item["text"] async for item in stream])

    async def generate(self, request: Any, context: Context) -> AsyncIterator[dict[str, Any]]:
        if request["stop_conditions"]["max_tokens"] == 7:
            self.begun.set()
            await context.async_killed_or_stopped()
            self.left.set()
            return
        async with BackgroundTasks() as tasks:
            calls = [tasks.start(self._ask(name, request, context)) for name in self._clients]
            text = "".join([await call for call in calls])
        yield {"token_ids": [], "text": text, "index": 0, "finish_reason": "stop"}


async def test_a_workflow_of_handlers_answers_behind_the_frontend(
    frontend: HttpClient, tiny_model: Path
) -> None:
    workflows: list[Workflow] = []

    @dynamo_worker()
    async def stage(runtime: Any, name: str) -> None:
        await runtime.endpoint(f"flow.{name}.generate").serve_endpoint(Stage(name).generate)

    @dynamo_worker()
    async def orchestrator(runtime: Any) -> None:
        clients = {
            name: await runtime.endpoint(f"flow.{name}.generate").client()
            for name in ("Hello", "World")
        }
        for client in clients.values():
            await client.wait_for_instances()
        endpoint = runtime.endpoint("flow.manual.generate")
        await llm.register_model(
            model_input=ModelInput.Tokens,
            model_type=ModelType.Chat | ModelType.Completions,
            endpoint=endpoint,
            model_path=str(tiny_model),
            model_name="hello-world",
            worker_type=WorkerType.Aggregated,
            needs=[],
            ignore_weights=True,
        )
        workflows.append(Workflow(clients))
        await endpoint.serve_endpoint(workflows[0].generate)

    async with BackgroundTasks() as tasks:
        for program in (stage("Hello"), stage("World"), orchestrator()):
            tasks.start(program)
        await until_served(frontend, "hello-world")
        assert await chat(frontend, "hello-world") == (200, "HelloWorld")
        status, text = await ask(frontend, "/v1/completions", model="hello-world", prompt="x")
        assert (status, msgspec.json.decode(text)["choices"][0]["text"]) == (200, "HelloWorld")

        waiting = tasks.start(chat(frontend, "hello-world", max_tokens=7))
        async with asyncio.timeout(10):
            await workflows[0].begun.wait()
            waiting.cancel()
            await workflows[0].left.wait()


async def test_handlers_of_text_and_tokens_serve_models(
    frontend: HttpClient, runtime: Any, tiny_model: Path
) -> None:
    async def answer_text(request: Any, context: Context) -> AsyncIterator[Any]:
        text = request["messages"][-1]["content"]
        if text == "refuse":
            raise HttpError(404, "not here")
        for part in ("you said ", text):
            yield {"choices": [{"index": 0, "delta": {"content": part}, "finish_reason": None}]}

    async def answer_tokens(request: Any) -> AsyncIterator[Any]:
        for token in request["token_ids"]:
            yield {"token_ids": [token]}

    text_endpoint = runtime.namespace("any").component("text").endpoint("generate")
    tokens_endpoint = runtime.endpoint("any.tokens.generate")
    async with BackgroundTasks() as tasks:
        tasks.start(text_endpoint.serve_endpoint(answer_text))
        await asyncio.sleep(0)  # registration may come before or after
        tasks.start(tokens_endpoint.serve_endpoint(answer_tokens))
        await llm.register_llm(ModelInput.Text, ModelType.Chat, text_endpoint, "no/path", "text")
        config = llm.ModelRuntimeConfig()
        config.max_num_seqs, config.tool_call_parser = 3, "unknown_parser"
        await llm.register_model(
            ModelInput.Tokens,
            ModelType.Chat,
            tokens_endpoint,
            str(tiny_model),
            model_aliases=["other"],
            kv_cache_block_size=32,
            runtime_config=config,
            migration_limit=3,
        )
        await until_served(frontend, "text", "tiny", "other")
        assert await chat(frontend, "text", "a") == (200, "you said a")
        assert await chat(frontend, "text", "refuse") == (404, "not here")
        status, answer = await ask(
            frontend, "/v1/completions", model="tiny", prompt="abcdef", max_tokens=4, stop=["d"]
        )
        choice = msgspec.json.decode(answer)["choices"][0]
        assert (status, choice["text"], choice["finish_reason"]) == (200, "abc", "stop")
        with pytest.raises(ConfigError, match="already"):
            await llm.register_model(ModelInput.Text, ModelType.Chat, text_endpoint, "x")
        await llm.unregister_model(tokens_endpoint)
        async with asyncio.timeout(20):
            while (await chat(frontend, "tiny"))[0] == 200:
                await asyncio.sleep(0.01)


async def test_a_model_that_cannot_be_served_is_not_registered(
    runtime: Any, tiny_model: Path
) -> None:
    async def answer(request: Any) -> AsyncIterator[Any]:
        yield request

    first, second = (runtime.endpoint(f"any.{name}.generate") for name in ("first", "second"))
    tokens = ModelInput.Tokens, ModelType.Chat
    async with BackgroundTasks() as tasks:
        tasks.start(first.serve_endpoint(answer))
        await llm.register_model(*tokens, first, str(tiny_model), "one")
        tasks.start(second.serve_endpoint(answer))
        async with asyncio.timeout(10):
            while len(runtime.handlers) < 2:
                await asyncio.sleep(0)
        for _ in range(2):  # a process is one worker of tokens
            with pytest.raises(ConfigError, match="already served by this process"):
                await llm.register_model(*tokens, second, str(tiny_model), "two")
        await llm.register_model(ModelInput.Text, ModelType.Chat, second, "", "two")

    third = runtime.endpoint("any.third.generate")
    await llm.register_model(*tokens, third, str(tiny_model), "three")
    for _ in range(2):
        with pytest.raises(ConfigError, match="already served by this process"):
            await third.serve_endpoint(answer)
        assert third.native.path not in {
            served.endpoint.path for served in runtime.native.served_endpoints
        }


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((ModelInput.Tensor, ModelType.TensorBased), {}, "tensors"),
        ((ModelInput.Tokens, ModelType.Embedding), {}, "Embedding"),
        ((ModelInput.Text, ModelType.Completions), {}, "Completions"),
        ((ModelInput.Tokens, ModelType.Chat), {"worker_type": WorkerType.Prefill}, "Prefill"),
        ((ModelInput.Tokens, ModelType.Chat), {"lora_name": "a"}, "LoRA"),
    ],
)
async def test_registrations_that_cannot_be_served_are_refused(
    runtime: Any, arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(Unsupported, match=message):
        await llm.register_model(*arguments, runtime.endpoint("n.c.e"), "path", **options)


async def test_wrong_arguments_are_refused(runtime: Any, tmp_path: Path) -> None:
    endpoint = runtime.endpoint("n.c.e")
    with pytest.raises(TypeError, match="modle_name"):
        await llm.register_model(ModelInput.Text, ModelType.Chat, endpoint, "path", modle_name="x")
    with pytest.raises(ModelUnavailable):
        await llm.register_model(ModelInput.Tokens, ModelType.Chat, endpoint, str(tmp_path))
    with pytest.raises(ImportError, match=r"dynamo\.llm\.KvRouter .*migrate"):
        from dynamo.llm import KvRouter  # noqa: F401
    assert llm_exceptions.HttpError is HttpError
    with pytest.raises(AttributeError):
        load_name("dynamo._core", "__path__")


class Engine:
    """Numbers the choices of its chunks, which belong to one answer."""

    def generate(self, request: Any) -> AsyncIterator[Any]:
        async def generator() -> AsyncIterator[Any]:
            text = request["prompt"] if "prompt" in request else request["messages"][0]["content"]
            if text == "refuse":
                raise HttpError(403, "not you")
            for index in range(3):
                delta = {"role": None, "content": f"chunk{index}"}
                reason = "stop" if index == 2 else None
                choice = {"index": index, "delta": delta, "finish_reason": reason}
                yield {"id": "chat-1", "choices": [choice]}

        return generator()


async def test_a_service_serves_engines_over_http(runtime: Any) -> None:
    begun, stopped = asyncio.Event(), asyncio.Event()

    async def wait(request: Any, context: Context) -> AsyncIterator[Any]:
        begun.set()
        await context.async_killed_or_stopped()
        stopped.set()
        yield {"choices": []}

    async def complete(request: Any, *, context: Context) -> AsyncIterator[Any]:
        yield {"choices": [{"index": 0, "text": request["prompt"], "finish_reason": "length"}]}

    loop = asyncio.get_running_loop()
    service = HttpService(port=(port := free_port()))
    service.add_chat_completions_model("mock", HttpAsyncEngine(Engine().generate, loop))
    service.add_chat_completions_model("wait", "checksum", HttpAsyncEngine(wait, loop))
    service.add_completions_model("prompts", HttpAsyncEngine(complete, loop))
    assert service.list_chat_completions_models() == ["mock", "wait"]
    assert service.list_completions_models() == ["prompts"]
    ended = service.run(runtime.child_token())
    client = HttpClient(f"http://127.0.0.1:{port}", {}, None)
    await until_served(client, "mock", "wait", "prompts")
    assert await chat(client, "mock") == (200, "chunk0chunk1chunk2")
    assert await chat(client, "mock", "refuse") == (403, "not you")
    messages = [{"role": "user", "content": "hi"}]
    _, text = await ask(client, CHAT, model="mock", stream=True, messages=messages)
    assert [f"chunk{index}" in text for index in range(4)] == [True, True, True, False]
    _, text = await ask(client, "/v1/completions", model="prompts", prompt="so")
    choice = msgspec.json.decode(text)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("so", "length")
    assert (await ask(client, "/v1/completions", model="prompts", prompt=[1]))[0] == 400
    async with BackgroundTasks() as tasks:
        call = tasks.start(chat(client, "wait"))
        async with asyncio.timeout(10):
            await begun.wait()
            call.cancel()
            await stopped.wait()
    runtime.shutdown()
    await ended
    client.close()


async def test_metrics_are_served_on_the_status_port(
    planes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_SYSTEM_ENABLED", "true")
    monkeypatch.setenv("DYN_SYSTEM_PORT", "0")

    @dynamo_worker()
    async def program(runtime: Any) -> tuple[str, int]:
        component = runtime.namespace("ns").component("cp")
        await component.create_service()
        metrics = component.endpoint("ep").metrics
        slots = metrics.create_intgauge("slots", "Slots")
        active = metrics.create_intgaugevec("active", "Active", ["worker_id", "model"])
        metrics.register_callback(lambda: slots.set(slots.get() + 1))
        active.set(5, {"worker_id": "w", "model": "m"})
        await runtime.ready()
        runtime.set_health_status(False)
        client = HttpClient(runtime.system_status_server_url(), {}, None)
        text = (await client.send("GET", "/metrics", b"")).body.decode()
        health = (await client.send("GET", "/health", b"")).status
        client.close()
        return text, health

    text, health = await program() or ("", 0)
    labels = 'dynamo_namespace="ns",dynamo_component="cp",dynamo_endpoint="ep"'
    assert f"dynamo_component_slots{{{labels}}} 1\n" in text
    assert f'dynamo_component_active{{worker_id="w",model="m",{labels}}} 5\n' in text
    assert health == 503
