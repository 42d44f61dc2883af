"""A request leaves nothing behind that only the cycle collector could free: its pauses are the
frontend's pauses."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

CHAT = "/v1/chat/completions"
BODY = {"model": "words", "messages": [{"role": "user", "content": "one two"}]}


@pytest.mark.parametrize(
    "body",
    [BODY, BODY | {"stream": True}, BODY | {"n": 0}, BODY | {"model": "none"}, b"{"],
    ids=["whole", "stream", "wrong field", "no model", "no JSON"],
)
async def test_answered(site: Any, connect: Any, body: Any) -> None:
    async def once() -> None:
        async with connect(site.port) as one:
            one.ask("POST", CHAT, body)
            await one.answer()

    assert await left_by(once) == []


async def test_left_by_the_client(site: Any, connect: Any) -> None:
    async def once() -> None:
        site.processor.cancelled.clear()
        async with connect(site.port) as one:
            one.ask("POST", CHAT, BODY | {"stream": True, "max_tokens": 10_000_000})
            await one.head()
        await site.processor.cancelled.wait()

    assert await left_by(once) == []


async def left_by(work: Any) -> list[str]:
    """The types of ours that a second run of `work` left for the collector."""
    await work()
    await asyncio.sleep(0.01)
    gc.collect()
    gc.disable()
    try:
        await work()
        await asyncio.sleep(0.01)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return [name for one in gc.garbage if (name := type(one).__module__).startswith("dynamo")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
