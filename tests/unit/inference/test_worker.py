"""A worker over the memory planes: calls, card, load, KV events, files and shutdown."""

from __future__ import annotations

import asyncio
import hashlib

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.inference.conftest import RecordingReply

from dynamo.core.codec import ReplyDecoder, encode_choice, encode_request, share_group
from dynamo.core.context import Context
from dynamo.core.errors import NoWorkers, ProtocolError, Unsupported
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import RuntimeSettings
from dynamo.core.tasks import run_all
from dynamo.core.values import BlocksCleared, BlocksStored, KvEvent, Load, RequestGroup
from dynamo.inference.echo import EchoEngine
from dynamo.inference.worker import EngineWorker, model_card_key
from dynamo.models.card import ModelCard
from dynamo.models.file_cache import FileRef
from dynamo.runtime.distributed import DistributedRuntime

CONTEXT = Context("r")


@pytest.fixture
async def runtime():
    planes = RuntimeSettings(
        discovery="memory:", requests="memory:", events="memory:", namespace="unit"
    )
    async with await DistributedRuntime.create(Settings(runtime=planes), role="worker") as runtime:
        yield runtime


@pytest.fixture
def content():
    return bytes(range(256)) * 2600


@pytest.fixture
def card(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    file = FileRef("tokenizer.json", sha256, len(content), str(path))
    return ModelCard(names=("org/tiny", "tiny"), context_tokens=9999, vocab_size=9, tokenizer=file)


@pytest.fixture
async def worker(runtime, make_engine, card):
    worker = EngineWorker(make_engine(context_tokens=400, speedup_ratio=1e6), card)
    await worker.attach(runtime)
    return worker


async def open_client(runtime, endpoint, component="worker"):
    client = await runtime.namespace("unit").component(component).endpoint(endpoint).client()
    await client.wait_for_instances(1, timeout_s=5)
    return client


async def call(client, payload, sink, **options):
    await client.call(client.pick("round_robin"), payload, CONTEXT, sink, **options)


async def test_a_worker_answers_and_names_itself(runtime, worker, make_request):
    client = await open_client(runtime, "generate")
    reply = RecordingReply()
    request = encode_request(make_request(range(40), max_tokens=5, top_logprobs=1))
    await call(client, request, ReplyDecoder(reply).feed)
    assert reply.started.worker == runtime.instance_id
    assert len(reply.ids) == len(reply.extras) == 5
    assert reply.end.reason == "length"
    await worker.close()


async def test_choices_of_a_group_are_answered_like_single_requests(runtime, worker, make_request):
    client = await open_client(runtime, "generate")
    request = make_request(range(200), max_tokens=7)
    group = RequestGroup(request)
    whole, choices = RecordingReply(), [RecordingReply() for _ in range(5)]
    await call(client, encode_request(request), ReplyDecoder(whole).feed)
    await run_all(
        *(
            call(
                client,
                encode_choice(replace(request, choice=number)),
                ReplyDecoder(reply).feed,
                shared=share_group(group),
            )
            for number, reply in enumerate(choices)
        )
    )
    assert [reply.ids for reply in choices] == [whole.ids] * 5
    await worker.close()


async def test_an_invalid_request_is_refused(runtime, worker):
    client = await open_client(runtime, "generate")
    with pytest.raises(ProtocolError):
        await call(client, b"\xc1", lambda _: True)
    await worker.close()


async def test_a_worker_refuses_what_its_engine_cannot_do(runtime, worker, make_request):
    client = await open_client(runtime, "generate")
    request = encode_request(replace(make_request(range(40)), adapter="poet"))
    with pytest.raises(Unsupported, match="does not support: adapters"):
        await call(client, request, lambda _: True)
    await worker.close()


async def test_the_card_describes_the_engine_that_serves(runtime, worker):
    key = model_card_key("unit", "org/tiny", runtime.instance_id)
    assert key == f"/unit/models/org%2Ftiny/{runtime.instance_id}"
    records = await runtime.discovery.get("/unit/models/")
    card = msgspec.json.decode(records[key], type=ModelCard)
    assert card.names == ("org/tiny", "tiny")
    assert card.context_tokens == 400
    assert card.engine.engine == "mock"
    assert card.engine.num_blocks == 16_384
    await worker.close()
    assert not await runtime.discovery.get("/unit/models/")


async def test_events_and_load_reach_a_late_listener(runtime, worker, make_request):
    client = await open_client(runtime, "generate")
    request = encode_request(make_request(range(40), max_tokens=1))
    await call(client, request, ReplyDecoder(RecordingReply()).feed)
    stored, loads, arrived = [], [], asyncio.Event()

    def on_kv(event):
        assert event.publisher == runtime.instance_id
        stored.extend(msgspec.msgpack.decode(event.payload, type=list[KvEvent]))
        arrived.set()

    def on_load(event):
        loads.append(msgspec.msgpack.decode(event.payload, type=Load))
        arrived.set()

    await runtime.events.subscribe("unit.worker.kv_events", on_kv)
    await runtime.events.subscribe("unit.worker.load_metrics", on_load)
    while not (stored and loads):
        arrived.clear()
        await arrived.wait()
    assert len(stored) == 1
    assert isinstance(stored[0], BlocksStored)
    assert len(stored[0].hashes) == 2
    assert loads[-1].total_blocks == 16_384
    other = encode_request(make_request(range(100, 140), max_tokens=1))
    await call(client, other, ReplyDecoder(RecordingReply()).feed)
    while len(stored) < 2:
        arrived.clear()
        await arrived.wait()
    assert stored[1].parent == 0
    await worker.close()


async def test_the_prefix_cache_is_cleared_on_demand(runtime, worker, make_request):
    client = await open_client(runtime, "generate")
    request = encode_request(make_request(range(40), max_tokens=1))
    await call(client, request, ReplyDecoder(RecordingReply()).feed)
    answers = []
    await call(
        await open_client(runtime, "clear_kv_blocks"), b"", lambda x: answers.append(x) or True
    )
    assert msgspec.msgpack.decode(answers[0]) == {"cleared": 2}
    second = RecordingReply()
    await call(client, request, ReplyDecoder(second).feed)
    assert second.started.cached_tokens == 0
    await worker.close()


async def test_closing_leaves_discovery_and_finishes_running_requests(
    runtime, worker, make_request
):
    client = await open_client(runtime, "generate")
    reply = RecordingReply()
    request = encode_request(make_request(range(40), max_tokens=300))
    running = runtime.tasks.start(call(client, request, ReplyDecoder(reply).feed))
    await reply.first.wait()
    await worker.close(drain_s=30)
    await running
    assert reply.end.reason == "length"
    assert len(reply.ids) == 300
    with pytest.raises(NoWorkers):
        client.pick("round_robin")


async def test_metrics_describe_the_engine(runtime, worker, make_request):
    client = await open_client(runtime, "generate")
    for _ in range(2):
        request = encode_request(make_request(range(40), max_tokens=3))
        await call(client, request, ReplyDecoder(RecordingReply()).feed)
    lines = runtime.metrics.render().splitlines()
    assert "dynamo_worker_generated_tokens_total 6" in lines
    assert "dynamo_worker_prompt_tokens_total 80" in lines
    assert "dynamo_worker_cached_tokens_total 32" in lines
    assert "dynamo_worker_running_requests 0" in lines
    assert not runtime.health.reasons
    await worker.close()


async def test_gateways_find_metrics_under_their_names(runtime, worker, make_request):
    client = await open_client(runtime, "generate")
    request = encode_request(make_request(range(40), max_tokens=5))
    for _ in range(2):
        await call(client, request, ReplyDecoder(RecordingReply()).feed)
    text = runtime.metrics.render()
    names = {
        (sample.name, sample.labels.get("le")): sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }

    def value(name, le=None):
        sample = names[f"vllm:{name}", le]
        assert sample.labels["model_name"] == "org/tiny"
        return sample.value

    assert value("num_requests_running") == value("num_requests_waiting") == 0
    assert value("kv_cache_usage_perc") == 0
    assert value("cache_config_info") == 1
    assert names["vllm:cache_config_info", None].labels["block_size"] == "16"
    assert value("prompt_tokens_total") == value("prefix_cache_queries_total") == 80
    assert value("prefix_cache_hits_total") == 32
    assert value("generation_tokens_total") == 10
    assert value("num_preemptions_total") == 0
    for name in ("request_queue_time", "request_prefill_time", "request_decode_time"):
        assert value(f"{name}_seconds_count") == 2
    assert value("time_to_first_token_seconds_count") == 2
    assert value("inter_token_latency_seconds_count") == 8
    assert value("e2e_request_latency_seconds_bucket", "+Inf") == 2
    assert names["dynamo_worker_step_seconds_count", None].value >= 5
    assert names["dynamo_worker_batch_requests_bucket", "1.0"].value >= 5
    await worker.close()


async def test_any_engine_can_be_served(runtime, card, make_request):
    worker = EngineWorker(EchoEngine(context_tokens=100), card, component="echoes")
    await worker.attach(runtime)
    client = await open_client(runtime, "generate", "echoes")
    reply = RecordingReply()
    await call(client, encode_request(make_request([5, 6, 7])), ReplyDecoder(reply).feed)
    assert reply.ids == [5, 6, 7]
    lines = runtime.metrics.render().splitlines()
    for name in ("prompt_tokens_total", "generation_tokens_total"):  # the engine counts none
        assert f'vllm:{name}{{model_name="org/tiny"}} 3' in lines
    for name in ("time_to_first_token", "e2e_request_latency"):
        assert f'vllm:{name}_seconds_count{{model_name="org/tiny"}} 1' in lines
    await worker.close()


class DistrustedRank(EchoEngine):
    """An engine whose events become useless."""

    def __init__(self):
        super().__init__(context_tokens=400)
        self.listeners = []
        self.problem = ""

    def on_kv_events(self, listener):
        self.listeners.append(listener)

    @property
    def kv_problem(self):
        return self.problem


async def test_routers_predict_a_rank_whose_events_have_become_useless(runtime, card):
    engine = DistrustedRank()
    worker = EngineWorker(engine, card)
    await worker.attach(runtime)
    kinds, gone = [], asyncio.Event()

    def on_event(event):
        kinds.append(event.kind)
        if event.kind == "gone":
            gone.set()

    await runtime.events.subscribe("unit.worker.kv_events", on_event)
    engine.problem = "the view is wrong"
    engine.listeners[0]([BlocksCleared()])
    await gone.wait()
    assert runtime.health.limitations["kv_events"] == "the view is wrong"
    await worker.close()
