"""LoRA adapters from the order of a frontend to the workers that have them, over TCP."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.support.fake_lora import FakeLoraLlm, install_lora, write_adapter

from dynamo.application import Gateway, ServedModel
from dynamo.core.adapters import AdapterOrder, adapter_name
from dynamo.core.context import Context
from dynamo.core.errors import InvalidRequest, ModelNotFound, NotFound, Unsupported
from dynamo.core.reply import Reply
from dynamo.core.settings import Settings
from dynamo.core.text import CompletionRequest, TextFinish, TextOptions, TextReply
from dynamo.core.values import EngineInfo, GenerateRequest, Started
from dynamo.inference.echo import EchoEngine
from dynamo.inference.vllm.engine import VllmAdapters
from dynamo.inference.worker import EngineWorker
from dynamo.models.card import ModelCard
from dynamo.models.file_cache import FileRef
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.supervisors import SupervisorRecord, supervisor_record_key
from dynamo.services.adapters import AdapterOrders
from dynamo.services.model_watcher import ModelWatcher
from dynamo.services.routing import ProcessRouting


class AdaptedEngine(EchoEngine):
    """Echoes, and records its requests. With `adapters` as vLLM has them."""

    def __init__(self, adapters: VllmAdapters | None) -> None:
        super().__init__(context_tokens=4096, vocab_size=1000)
        self.adapters = adapters
        self.requests: list[GenerateRequest] = []

    async def start(self) -> EngineInfo:
        info = await super().start()
        if self.adapters is None:
            return info
        await self.adapters.start()
        return replace(info, features=("adapters",))

    async def generate(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        if request.adapter:
            assert self.adapters is not None
            self.adapters.find(request.adapter)
        self.requests.append(request)
        await super().generate(request, context, reply)


class Deployment:
    """Processes that share a discovery folder. Workers serve the model `tiny`."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder, self._model = folder, model
        self.processes: list[DistributedRuntime] = []
        self.gateway = Gateway()

    async def open_process(self) -> DistributedRuntime:
        settings = Settings()
        runtime = replace(settings.runtime, discovery=f"file:{self._folder}")
        self.processes.append(
            process := await DistributedRuntime.create(replace(settings, runtime=runtime))
        )
        return process

    async def start_frontend(self) -> AdapterOrders:
        """Start a frontend, and wait until it serves the model of a worker."""
        runtime = await self.open_process()
        ModelWatcher(runtime, self.gateway, ProcessRouting(runtime)).start()
        await until(lambda: self.gateway.models)
        return AdapterOrders(runtime, self.gateway)

    async def start_worker(
        self, *, with_adapters: bool = True, model: str = "tiny"
    ) -> AdaptedEngine:
        return await self.attach(VllmAdapters(FakeLoraLlm()) if with_adapters else None, model)

    async def attach(self, adapters: VllmAdapters | None, model: str = "tiny") -> AdaptedEngine:
        path = self._model / "tokenizer.json"
        data = path.read_bytes()
        file = FileRef(path.name, hashlib.sha256(data).hexdigest(), len(data), str(path))
        card = ModelCard(names=(model,), context_tokens=4096, vocab_size=1000, tokenizer=file)
        engine = AdaptedEngine(adapters)
        await EngineWorker(engine, card).attach(await self.open_process())
        return engine

    async def complete(self, model: str, count: int = 1) -> None:
        _, served = self.gateway.find(model)
        for number in range(count):
            request = CompletionRequest(model, "the lazy dog", TextOptions(max_tokens=2))
            await served.processor.complete(request, Context(f"{model}-{number}"), IgnoredReply())


class SlowAdapters(VllmAdapters):
    """Loads `sql` when `release` is set."""

    def __init__(self) -> None:
        super().__init__(FakeLoraLlm())
        self.release = asyncio.Event()

    async def load(self, name: str, path: str, *, replace: bool = False) -> None:
        if name == "sql":
            await self.release.wait()
        await super().load(name, path, replace=replace)


class IgnoredReply(TextReply):
    """Reads an answer and drops it."""

    def prompt(self, prompt_tokens: int, repeated_bytes: int = 0) -> None:
        pass

    def begin(self, choice: int, started: Started) -> None:
        pass

    def text(self, choice: int, delta: str, logprobs: object = None) -> bool:
        return True

    def finish(self, choice: int, end: TextFinish) -> None:
        pass


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def deployment(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Deployment]:
    install_lora(monkeypatch)
    deployment = Deployment(tmp_path / "discovery", tiny_model)
    yield deployment
    for process in deployment.processes:
        await process.shutdown(0)


def adapters_of(gateway: Gateway) -> dict[str, ServedModel]:
    return {name: model for name, model in gateway.models.items() if model.parent}


async def test_requests_that_name_an_adapter_go_to_workers_that_have_it(
    deployment: Deployment, tmp_path: Path
) -> None:
    without = await deployment.start_worker(with_adapters=False)
    engines = [await deployment.start_worker() for _ in range(2)]
    orders = await deployment.start_frontend()
    path = write_adapter(tmp_path / "sql")

    await orders.execute(AdapterOrder("sql", path))

    served = adapters_of(deployment.gateway)["sql"]
    assert (served.names, served.parent, served.root) == (("sql",), "tiny", path)
    await deployment.complete("sql", 6)
    assert without.requests == []
    sent = [request for engine in engines for request in engine.requests]
    assert {request.adapter for request in sent} == set(engines[0].adapters.paths)
    assert len(sent) == 6
    await deployment.complete("tiny", 6)
    own = next(request for request in without.requests + engines[0].requests if not request.adapter)
    assert (own.adapter, own.salt) == ("", "")
    assert {request.salt for request in sent}.isdisjoint({""})
    assert deployment.gateway.find("default")[0] == "tiny"


async def test_a_worker_that_comes_later_has_the_adapters_of_the_others(
    deployment: Deployment, tmp_path: Path
) -> None:
    first = await deployment.start_worker()
    orders = await deployment.start_frontend()
    await orders.execute(AdapterOrder("sql", write_adapter(tmp_path / "sql")))

    second = await deployment.start_worker()

    assert second.adapters.paths == first.adapters.paths != {}


async def test_a_worker_misses_no_order_while_it_loads_the_adapters_of_the_others(
    deployment: Deployment, tmp_path: Path
) -> None:
    first = await deployment.start_worker()
    orders = await deployment.start_frontend()
    await orders.execute(AdapterOrder("sql", write_adapter(tmp_path / "sql")))
    adapters = SlowAdapters()
    start = asyncio.create_task(deployment.attach(adapters))

    async def load_until_both_have_it() -> None:
        while "late" not in str(adapters.paths):
            await orders.execute(AdapterOrder("late", write_adapter(tmp_path / "late")))

    await asyncio.wait_for(load_until_both_have_it(), 20)
    assert not start.done()
    adapters.release.set()
    await start

    assert first.adapters is not None
    assert adapters.paths.keys() == first.adapters.paths.keys()
    assert len(adapters.paths) == 2

    async def complete_until_it_has_answered() -> None:
        while not start.result().requests:
            await deployment.complete("late", 2)

    await asyncio.wait_for(complete_until_it_has_answered(), 20)


async def test_an_order_goes_to_the_workers_of_one_model(
    deployment: Deployment, tmp_path: Path
) -> None:
    engines = {name: await deployment.start_worker(model=name) for name in ("tiny", "other")}
    orders = await deployment.start_frontend()
    await until(lambda: len(deployment.gateway.models) == 2)
    path = write_adapter(tmp_path / "sql")
    with pytest.raises(InvalidRequest, match="several models can have LoRA adapters: other, tiny"):
        await orders.execute(AdapterOrder("sql", path))
    with pytest.raises(Unsupported, match="no worker of third has LoRA adapters"):
        await orders.execute(AdapterOrder("sql", path, model="third"))

    await orders.execute(AdapterOrder("sql", path, model="other"))

    loaded = {
        name: engine.adapters and len(engine.adapters.paths) for name, engine in engines.items()
    }
    assert loaded == {"tiny": 0, "other": 1}
    assert adapters_of(deployment.gateway)["sql"].parent == "other"
    await orders.execute(AdapterOrder("sql"))
    assert adapters_of(deployment.gateway) == {}


async def test_an_unloaded_adapter_is_an_unknown_model(
    deployment: Deployment, tmp_path: Path
) -> None:
    await deployment.start_worker()
    orders = await deployment.start_frontend()
    await orders.execute(AdapterOrder("sql", write_adapter(tmp_path / "sql")))
    await orders.execute(AdapterOrder("sql"))
    with pytest.raises(ModelNotFound, match="there is no model 'sql'"):
        deployment.gateway.find("sql")
    with pytest.raises(NotFound, match="no LoRA adapter 'sql'"):
        await orders.execute(AdapterOrder("sql"))
    with pytest.raises(InvalidRequest, match="is no LoRA adapter"):
        await orders.execute(AdapterOrder("sql", str(tmp_path)))
    for model in ("tiny", "default"):
        with pytest.raises(InvalidRequest, match="name of a model"):
            await orders.execute(AdapterOrder(model, "/x"))


async def test_an_adapter_that_one_worker_lacks_is_unloaded(
    deployment: Deployment, tmp_path: Path
) -> None:
    engines = [await deployment.start_worker() for _ in range(2)]
    orders = await deployment.start_frontend()
    await orders.execute(AdapterOrder("sql", write_adapter(tmp_path / "sql")))
    assert engines[0].adapters is not None
    await engines[0].adapters.unload("sql")

    await orders.execute(AdapterOrder("sql"))

    assert engines[1].adapters is not None
    assert engines[1].adapters.paths == {}
    assert adapters_of(deployment.gateway) == {}


async def test_replaced_weights_of_one_folder_answer_the_next_request(
    deployment: Deployment, tmp_path: Path
) -> None:
    engine = await deployment.start_worker()
    orders = await deployment.start_frontend()
    await orders.execute(AdapterOrder("sql", write_adapter(tmp_path / "sql")))
    path = write_adapter(tmp_path / "sql", b"trained again")

    await orders.execute(AdapterOrder("sql", path, replace=True))

    await deployment.complete("sql")
    assert engine.adapters is not None
    assert [request.adapter for request in engine.requests] == list(engine.adapters.paths)


async def test_a_request_that_was_begun_before_a_replacement_is_answered(
    deployment: Deployment, tmp_path: Path
) -> None:
    engine = await deployment.start_worker()
    orders = await deployment.start_frontend()
    await orders.execute(AdapterOrder("sql", write_adapter(tmp_path / "sql")))
    _, before = deployment.gateway.find("sql")
    await orders.execute(AdapterOrder("sql", write_adapter(tmp_path / "2", b"2"), replace=True))

    request = CompletionRequest("sql", "the lazy dog", TextOptions(max_tokens=2))
    await before.processor.complete(request, Context("late"), IgnoredReply())

    assert engine.adapters is not None
    assert [request.adapter for request in engine.requests] == list(engine.adapters.replaced)
    await orders.execute(AdapterOrder("sql"))
    with pytest.raises(Unsupported, match="no worker of this model supports"):
        await before.processor.complete(request, Context("later"), IgnoredReply())


async def test_orders_need_a_worker_that_can_have_adapters(deployment: Deployment) -> None:
    await deployment.start_worker(with_adapters=False)
    orders = await deployment.start_frontend()
    with pytest.raises(Unsupported, match="no worker here has LoRA adapters"):
        await orders.execute(AdapterOrder("sql", "/x"))


async def test_the_record_of_a_supervisor_outlives_all_workers(
    deployment: Deployment, tmp_path: Path
) -> None:
    supervisor = await deployment.open_process()
    adapters = {
        "sql": write_adapter(tmp_path / "sql"),
        "code": "",
        "bad": str(tmp_path),
    }
    namespace = supervisor.settings.runtime.namespace
    for key, wanted in {"tiny": adapters, "other": {"x": adapters["sql"]}}.items():
        record = SupervisorRecord({}, namespace=namespace, adapters={key: wanted})
        await supervisor.discovery.put(supervisor_record_key(key), msgspec.json.encode(record))

    declared = VllmAdapters(FakeLoraLlm(), [f"code={write_adapter(tmp_path / 'code', b'code')}"])
    engine = await deployment.attach(declared)

    assert engine.adapters is not None
    assert {adapter_name(adapter) for adapter in engine.adapters.paths} == {"sql"}


async def test_names_of_models_to_be_served_are_no_adapters(
    deployment: Deployment, tmp_path: Path
) -> None:
    for model in ("tiny", "other"):
        await deployment.start_worker(model=model)
    orders = await deployment.start_frontend()
    await until(lambda: len(deployment.gateway.models) == 2)
    deployment.gateway.set_desired({"tiny": ("chat",), "later": ("soon",), "other": ()})
    path = write_adapter(tmp_path / "sql")
    for name in ("chat", "later", "soon"):
        with pytest.raises(InvalidRequest, match="name of a model"):
            await orders.execute(AdapterOrder(name, path, model="tiny"))
    await orders.execute(AdapterOrder("sql", path, model="chat"))
    with pytest.raises(InvalidRequest, match="'sql' is an adapter of 'tiny' already"):
        await orders.execute(AdapterOrder("sql", path, model="other"))
