"""`RemoteTier` when the object store is away, frozen, failing or not usable by these settings."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from tests.support.servers import S3Process, free_port, freeze
from tests.unit.inference_tiers.blocks import ManualClock, Memory, OpenRemote, count_held, load

from dynamo.core.errors import ConfigError
from dynamo.inference.tiers import object_store

pytestmark = pytest.mark.timeout(90)  # the first test starts the server


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(object_store, "WRITE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(object_store, "RETRY_S", 0.4)


@pytest.fixture
async def failing_server() -> AsyncIterator[str]:
    """A server that answers everything with status 500."""
    writers: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):  # no request came
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    for writer in writers:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def test_a_frozen_store_is_left_alone_and_tried_again(
    short_timeouts: None, open_remote: OpenRemote, s3_server: S3Process, clock: ManualClock
) -> None:
    memory = Memory(block_bytes=64)
    chain, other = memory.chain("a", 3), memory.chain("b", 3)
    tier = await open_remote(memory)
    await tier.store(memory.outgoing(chain))
    freeze(s3_server.pid)
    try:
        assert await load(tier, memory, chain) == 0
        assert await tier.store(memory.outgoing(other)) == 0
        assert await load(tier, memory, chain) == 0
        assert tier._store.url in tier.problem
        assert count_held(tier, chain.hashes) == 0
        started_s = time.monotonic()
        assert await load(tier, memory, chain) == 0
        assert await tier.store(memory.outgoing(other)) == 0
        assert time.monotonic() - started_s < 0.2, "asked although it had failed"
    finally:
        s3_server.signal(signal.SIGCONT)
    clock.time_s += 60

    assert await load(tier, memory, chain) == 3
    assert tier.problem == ""
    assert await tier.store(memory.outgoing(other)) == 3
    assert tier.counters.failures == 3


async def test_loads_that_are_given_up_count_as_failures(
    open_remote: OpenRemote, s3_server: S3Process, clock: ManualClock
) -> None:
    memory = Memory(block_bytes=64)
    chain = memory.chain("a", 3)
    tier = await open_remote(memory)
    await tier.store(memory.outgoing(chain))
    freeze(s3_server.pid)
    try:
        for _ in range(3):
            task = asyncio.ensure_future(tier.load(memory.incoming(chain), lambda _: None))
            await asyncio.sleep(0.01)
            clock.time_s += 2.0
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    finally:
        s3_server.signal(signal.SIGCONT)

    assert "no answer in time" in tier.problem


async def test_a_store_too_slow_for_its_time_limit_is_not_asked_again_for_a_while(
    short_timeouts: None, open_remote: OpenRemote, s3_server: S3Process, clock: ManualClock
) -> None:
    memory = Memory(block_bytes=64)
    chain = memory.chain("a", 3)
    tier = await open_remote(memory)
    await tier.store(memory.outgoing(chain))
    guess_s = tier.predict_load_s(3)
    freeze(s3_server.pid)
    try:
        loading = asyncio.ensure_future(load(tier, memory, chain))
        await asyncio.sleep(0)
        clock.time_s += 1.1  # the time that the read took, as the tier sees it
        assert await loading == 0
    finally:
        s3_server.signal(signal.SIGCONT)

    assert tier.problem == "", "one failure is no problem yet"
    assert tier.predict_load_s(3) > 60
    clock.time_s += 61
    assert tier.predict_load_s(3) == guess_s


@pytest.mark.parametrize("kind", ["away", "fails"])
async def test_a_worker_starts_without_its_store(
    short_timeouts: None,
    open_remote: OpenRemote,
    failing_server: str,
    s3_server: S3Process,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    away = failing_server if kind == "fails" else f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", away)
    memory = Memory(block_bytes=64)
    chain = memory.chain("a", 3)

    tier = await open_remote(memory)

    assert "does not answer" in tier.problem
    assert await tier.store(memory.outgoing(chain)) == 0
    assert await load(tier, memory, chain) == 0
    clock.time_s += 60
    assert await tier.store(memory.outgoing(chain)) == 0
    assert tier.problem


@pytest.mark.parametrize(
    ("environ", "bucket", "message", "hint"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "kv-blocks", "is denied", "AWS_SECRET_ACCESS_KEY"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "kv-blocks", "is denied", "AWS_ACCESS_KEY_ID"),
        ({}, "no-such-bucket", "no-such-bucket does not exist", "create it"),
    ],
)
async def test_settings_that_cannot_work_are_refused(
    open_remote: OpenRemote,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    bucket: str,
    message: str,
    hint: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(ConfigError, match=message) as refused:
        await open_remote(Memory(block_bytes=64), url=f"s3://{bucket}/kv")

    assert hint in refused.value.hint
    assert refused.value.param == "cache.remote_url"


@pytest.mark.parametrize("url", ["", "/tmp/kv", "s3:///kv", "ftp://host/kv", "s3:bucket"])
async def test_other_urls_are_refused(open_remote: OpenRemote, url: str) -> None:
    with pytest.raises(ConfigError, match="is not an object store") as refused:
        await open_remote(Memory(block_bytes=64), url=url)
    assert "s3://BUCKET/PREFIX" in refused.value.hint


@pytest.mark.parametrize("in_variable", [True, False])
async def test_credentials_in_urls_are_refused_and_not_shown(
    open_remote: OpenRemote, monkeypatch: pytest.MonkeyPatch, in_variable: bool
) -> None:
    url = "s3://kv-blocks/kv"
    if in_variable:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://KEY:swordfish@127.0.0.1:9000")
    else:
        url = "s3://KEY:swordfish@kv-blocks/kv"
    with pytest.raises(ConfigError, match="has a user or a password") as refused:
        await open_remote(Memory(block_bytes=64), url=url)
    assert "AWS_SECRET_ACCESS_KEY" in refused.value.hint
    assert "swordfish" not in refused.value.message


async def test_missing_credentials_are_named(
    short_timeouts: None, open_remote: OpenRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")

    with pytest.raises(ConfigError, match="no credentials") as refused:
        await open_remote(Memory(block_bytes=64))

    assert "AWS_ACCESS_KEY_ID" in refused.value.hint
