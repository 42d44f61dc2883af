"""A reader that does not read: its texts are merged, then it is dropped."""

from __future__ import annotations

import asyncio
from typing import Any

CHAT = "/v1/chat/completions"
BODY = {"model": "words", "messages": [{"role": "user", "content": "some words of a tale"}]}


def said(events: list[Any]) -> str:
    return "".join(
        one["choices"][0]["delta"].get("content", "")
        for one in events
        if one != "[DONE]" and one.get("choices")
    )


async def finished(site: Any) -> None:
    while site.application.generation.concurrency.running:
        await asyncio.sleep(0.005)


async def test_texts_merge_and_none_is_lost(open_site: Any, connect: Any) -> None:
    site = await open_site(stream_backlog_bytes=256 << 10)
    site.processor.turns = False
    count = 12_000
    async with connect(site.port, receive_buffer=4096) as one:
        one.ask("POST", CHAT, BODY | {"stream": True, "max_tokens": count})
        await site.processor.entered.wait()
        await finished(site)
        answer = await one.answer()
    events = answer.events
    assert said(events) == "".join(["some ", "words ", "of ", "a ", "tale "] * (count // 5))
    assert len(events) < count
    assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_merged_texts_keep_their_logprobs(open_site: Any, connect: Any) -> None:
    site = await open_site(stream_backlog_bytes=1 << 20)
    site.processor.turns = False
    async with connect(site.port, receive_buffer=4096) as one:
        one.ask("POST", CHAT, BODY | {"stream": True, "max_tokens": 4_000, "logprobs": True})
        await site.processor.entered.wait()
        await finished(site)
        events = (await one.answer()).events
    tokens = [
        entry["token"]
        for one in events[:-1]
        for entry in (one["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert "".join(tokens) == said(events)
    assert len(tokens) == 4_000
    assert len(events) < 4_000


async def test_past_the_limit_it_ends_as_slow_reader(open_site: Any, connect: Any) -> None:
    site = await open_site(stream_backlog_bytes=64 << 10)
    site.processor.turns = False
    async with connect(site.port, receive_buffer=4096) as one:
        one.ask("POST", CHAT, BODY | {"stream": True, "max_tokens": 10_000_000})
        await site.processor.entered.wait()
        await finished(site)
        *texts, error, done = (await one.answer()).events
    assert error["error"]["code"] == "slow_reader"
    assert done == "[DONE]"
    assert ("some words of a tale " * 1_000_000).startswith(said(texts))
