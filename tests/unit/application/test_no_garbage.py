"""Requests leave no reference cycles: collecting them would pause the frontend."""

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
    ids=["complete", "stream", "wrong field", "no model", "no JSON"],
)
async def test_answered_requests_leave_no_cycles(site: Any, connect: Any, body: Any) -> None:
    async def once() -> None:
        async with connect(site.port) as connection:
            connection.ask("POST", CHAT, body)
            await connection.answer()

    assert await garbage_types(once) == []


async def test_disconnects_leave_no_cycles(site: Any, connect: Any) -> None:
    async def once() -> None:
        site.processor.cancelled.clear()
        async with connect(site.port) as connection:
            connection.ask("POST", CHAT, BODY | {"stream": True, "max_tokens": 10_000_000})
            await connection.head()
        await site.processor.cancelled.wait()

    assert await garbage_types(once) == []


async def garbage_types(work: Any) -> list[str]:
    """Run `work` twice; return the modules of our objects that the second run left as garbage."""
    await work()
    await asyncio.sleep(0.01)
    gc.collect()
    gc.disable()
    try:
        await work()
        await asyncio.sleep(0.01)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        modules = [type(leftover).__module__ for leftover in gc.garbage]
        return [module for module in modules if module.startswith("dynamo")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
