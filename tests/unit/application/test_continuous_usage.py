"""Streams with the usage so far in each event."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.application.test_chat_api import ask

from dynamo.core.context import Context
from dynamo.core.text import ChatRequest, TextFinish, TextReply
from dynamo.core.values import Started

OPTIONS = {"include_usage": True, "continuous_usage_stats": True}


@pytest.fixture
def answered(site: Any, monkeypatch: Any) -> None:
    """Let the site answer two choices, whose tokens are counted."""

    async def chat(request: ChatRequest, context: Context, reply: TextReply) -> None:
        site.processor.requests.append(request)
        reply.prompt(5)
        for choice in range(request.options.n):
            reply.begin(choice, Started(cached_tokens=2))
        for choice in range(request.options.n):
            for tokens, text in ((1, "a"), (3, "b")):
                reply.count_tokens(choice, tokens)
                reply.text(choice, text)
        for choice in range(request.options.n):
            reply.finish(choice, TextFinish("stop", 5))

    monkeypatch.setattr(site.processor, "chat", chat)


@pytest.mark.usefixtures("answered")
async def test_every_event_has_the_tokens_so_far(site: Any, connect: Any) -> None:
    events = (await ask(connect, site, stream=True, n=2, stream_options=OPTIONS)).events[:-1]
    usages = [event["usage"] for event in events]
    assert [usage["completion_tokens"] for usage in usages] == [0, 1, 4, 4, 5, 8, 9, 10, 10]
    assert {usage["prompt_tokens"] for usage in usages} == {5}
    assert all(usage["total_tokens"] == 5 + usage["completion_tokens"] for usage in usages)
    assert usages[0]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert events[-1]["choices"] == []
    assert site.processor.requests[-1].options.count_tokens


@pytest.mark.usefixtures("answered")
async def test_as_in_vllm_only_with_usage_at_the_end(site: Any, connect: Any) -> None:
    options = {"continuous_usage_stats": True}
    events = (await ask(connect, site, stream=True, stream_options=options)).events[:-1]
    assert not any("usage" in event for event in events)
    assert not site.processor.requests[-1].options.count_tokens
