"""Models are served from the first worker on that a frontend can reach, over TCP."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.support.certificates import has_openssl, make_authority, make_certificate

from dynamo.application import Gateway
from dynamo.core.errors import ModelNotReady, ProtocolError
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_cluster import SecuritySettings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.inference.mock.engine import make_mock_engine
from dynamo.inference.worker import EngineWorker
from dynamo.models.card import ModelCard
from dynamo.models.file_cache import FileRef
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.supervisors import SupervisorRecord, removals_prefix, supervisor_record_key
from dynamo.services.model_watcher import ModelWatcher
from dynamo.services.routing import ProcessRouting

WRONG_SECRET = "the server does not know this deployment's secret (security.secret)"


def with_secret(letter: str) -> SecuritySettings:
    return SecuritySettings(secret=letter * 32)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def open_process(folder: Path, security: SecuritySettings) -> DistributedRuntime:
    settings = Settings()
    runtime = replace(settings.runtime, discovery=f"file:{folder}")
    return await DistributedRuntime.create(replace(settings, runtime=runtime, security=security))


async def start_worker(runtime: DistributedRuntime, model: Path, name: str = "tiny") -> None:
    path = model / "tokenizer.json"
    data = path.read_bytes()
    file = FileRef(path.name, hashlib.sha256(data).hexdigest(), len(data), str(path))
    card = ModelCard(names=(name,), context_tokens=4096, vocab_size=1000, tokenizer=file)
    settings = EngineSettings(kind="mock", speedup_ratio=1000)
    engine = make_mock_engine(settings, range(100, 900), runtime.clock, context_tokens=4096)
    await EngineWorker(engine, card).attach(runtime)


@pytest.mark.skipif(not has_openssl(), reason="needs openssl")
@pytest.mark.parametrize("tls_end", ["worker", "frontend"])
async def test_tls_at_one_end_is_named_and_no_model_is_ready(
    tiny_model: Path, tmp_path: Path, tls_end: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    make_authority(tmp_path)
    tls = make_certificate(tmp_path, "node")
    security = SecuritySettings(tls_ca=tls.ca, tls_cert=tls.cert, tls_key=tls.key)
    folder = tmp_path / "discovery"
    worker = await open_process(folder, security if tls_end == "worker" else SecuritySettings())
    runtime = await open_process(folder, security if tls_end != "worker" else SecuritySettings())
    await start_worker(worker, tiny_model)
    gateway = Gateway()
    ModelWatcher(runtime, gateway, ProcessRouting(runtime)).start()
    await until(lambda: "TLS (security.tls_ca)" in runtime.health.reasons.get("tiny", ""))
    assert not gateway.models
    assert "model ready" not in caplog.messages
    for process in (runtime, worker):
        await process.shutdown(0)


async def test_a_model_whose_workers_have_another_secret_is_not_served(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    strange = await open_process(tmp_path, with_secret("s"))
    await start_worker(strange, tiny_model)
    runtime = await open_process(tmp_path, with_secret("f"))
    gateway = Gateway()
    watcher = ModelWatcher(runtime, gateway, ProcessRouting(runtime))
    watcher.start()
    await until(lambda: "unreachable" in runtime.health.reasons.get("tiny", ""))
    await watcher.wait_until_opened(20)
    reason = f"no worker of this model is reachable: 1 unreachable: {WRONG_SECRET}"
    assert runtime.health.reasons == {"tiny": reason}
    assert watcher.unreachable_workers() == {strange.instance_id: f"unreachable: {WRONG_SECRET}"}
    assert (gateway.models, watcher.count_workers()) == ({}, {"tiny": 0})
    with pytest.raises(ModelNotReady, match="does not know this deployment's secret"):
        gateway.find("tiny")

    known = await open_process(tmp_path, with_secret("f"))
    await start_worker(known, tiny_model)
    await until(lambda: gateway.models)
    assert caplog.messages.count("model ready") == 1
    assert runtime.health.healthy
    assert watcher.count_workers() == {"tiny": 1}
    assert watcher.unreachable_workers().keys() == {strange.instance_id}
    for process in (runtime, known, strange):
        await process.shutdown(0)


async def test_the_reason_of_other_versions_and_dead_addresses_is_named(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await start_worker(worker := await open_process(tmp_path, with_secret("f")), tiny_model)
    runtime = await open_process(tmp_path, with_secret("f"))
    health = runtime.health

    def refuse(_: object) -> None:
        raise ProtocolError("the peer speaks protocol 7 to 8, this process 1 to 1")

    with monkeypatch.context() as patch:
        patch.setattr("dynamo.communication.handshake.check_version", refuse)
        ModelWatcher(runtime, Gateway(), ProcessRouting(runtime)).start()
        await until(lambda: "protocol 7 to 8" in health.reasons.get("tiny", ""))
        await worker.requests.close()
        await until(lambda: "connection refused" in health.reasons.get("tiny", ""))
    for process in (runtime, worker):
        await process.shutdown(0)


async def list_models(runtime: DistributedRuntime, *models: str) -> None:
    """Write the record of a supervisor that serves these models."""
    record = SupervisorRecord(models=dict.fromkeys(models, ()), namespace="dynamo")
    await runtime.discovery.put(supervisor_record_key("one"), msgspec.json.encode(record))


async def test_a_frontend_is_healthy_while_one_model_has_workers(
    tiny_model: Path, tmp_path: Path
) -> None:
    first, second = [await open_process(tmp_path, with_secret("f")) for _ in range(2)]
    await start_worker(first, tiny_model, "a")
    await start_worker(second, tiny_model, "b")
    runtime = await open_process(tmp_path, with_secret("f"))
    watcher = ModelWatcher(runtime, Gateway(), ProcessRouting(runtime))
    watcher.start()
    await until(lambda: watcher.count_workers() == {"a": 1, "b": 1})
    await first.shutdown(0)
    await until(lambda: watcher.count_workers() == {"a": 0, "b": 1})
    assert runtime.health.healthy
    states = watcher.model_states()
    assert (states["a"].state, states["b"].state) == ("unloaded", "loaded")
    assert "no worker of this model is reachable" in states["a"].reason

    await second.shutdown(0)
    await until(lambda: runtime.health.reasons.keys() == {"a", "b"})
    await runtime.shutdown(0)


async def test_a_removed_model_is_closed_when_its_last_request_has_ended(
    tiny_model: Path, tmp_path: Path
) -> None:
    worker = await open_process(tmp_path, with_secret("f"))
    await list_models(worker, "a")
    await start_worker(worker, tiny_model, "a")
    runtime = await open_process(tmp_path, with_secret("f"))
    gateway = Gateway()
    watcher = ModelWatcher(runtime, gateway, ProcessRouting(runtime))
    requests, closed = {"a": 1}, list[str]()
    watcher.take_requests = lambda model: lambda: requests[model]
    watcher.on_closed = closed.append
    watcher.start()
    await until(lambda: gateway.models)
    processor = weakref.ref(gateway.find("a")[1].processor)
    prefix = removals_prefix("dynamo", "a")

    await list_models(worker)
    await until(lambda: not gateway.models)
    async with asyncio.timeout(20):
        while list(await worker.discovery.get(prefix)) != [prefix + runtime.instance_id]:
            await asyncio.sleep(0.01)
    assert not closed
    assert 'model="a"' in runtime.metrics.render()
    requests["a"] = 0
    await until(lambda: closed == ["a"])
    await until(lambda: processor() is None)
    assert 'model="a"' not in runtime.metrics.render()
    assert not await worker.discovery.get(prefix)
    assert runtime.health.reasons.keys() <= {"models"}
    for process in (runtime, worker):
        await process.shutdown(0)
