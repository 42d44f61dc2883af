"""Streams whose client does not read: texts are merged, then the stream is ended."""

from __future__ import annotations

import asyncio
from typing import Any

CHAT = "/v1/chat/completions"
BODY = {"model": "words", "messages": [{"role": "user", "content": "some words of a tale"}]}


def stream_text(events: list[Any]) -> str:
    return "".join(
        event["choices"][0]["delta"].get("content", "")
        for event in events
        if event != "[DONE]" and event.get("choices")
    )


async def wait_until_idle(site: Any) -> None:
    while site.application.generation.concurrency.running:
        await asyncio.sleep(0.005)


async def test_texts_are_merged_and_none_is_lost(open_site: Any, connect: Any) -> None:
    site = await open_site(stream_backlog_bytes=256 << 10)
    site.processor.yields = False
    count = 12_000
    async with connect(site.port, receive_buffer=4096) as connection:
        connection.ask("POST", CHAT, BODY | {"stream": True, "max_tokens": count})
        await site.processor.entered.wait()
        await wait_until_idle(site)
        answer = await connection.answer()
    events = answer.events
    assert stream_text(events) == "".join(["some ", "words ", "of ", "a ", "tale "] * (count // 5))
    assert len(events) < count
    assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_merged_texts_keep_their_logprobs(open_site: Any, connect: Any) -> None:
    site = await open_site(stream_backlog_bytes=1 << 20)
    site.processor.yields = False
    async with connect(site.port, receive_buffer=4096) as connection:
        connection.ask("POST", CHAT, BODY | {"stream": True, "max_tokens": 4_000, "logprobs": True})
        await site.processor.entered.wait()
        await wait_until_idle(site)
        events = (await connection.answer()).events
    tokens = [
        entry["token"]
        for event in events[:-1]
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert "".join(tokens) == stream_text(events)
    assert len(tokens) == 4_000
    assert len(events) < 4_000


async def test_a_stream_over_its_backlog_limit_ends_with_slow_reader(
    open_site: Any, connect: Any
) -> None:
    site = await open_site(stream_backlog_bytes=64 << 10)
    site.processor.yields = False
    async with connect(site.port, receive_buffer=4096) as connection:
        connection.ask("POST", CHAT, BODY | {"stream": True, "max_tokens": 10_000_000})
        await site.processor.entered.wait()
        await wait_until_idle(site)
        *texts, error, done = (await connection.answer()).events
    assert error["error"]["code"] == "slow_reader"
    assert done == "[DONE]"
    assert ("some words of a tale " * 1_000_000).startswith(stream_text(texts))
