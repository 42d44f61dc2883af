"""Each request that generates text ends in one story, however it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from dynamo.application.generation.stories import Stories
from dynamo.application.responses.store import ResponseStore
from dynamo.core.clock import SystemClock
from dynamo.telemetry.story import Story
from dynamo.telemetry.trace_context import make_trace_id

CHAT = "/v1/chat/completions"
BODY = {"model": "spoken", "messages": [{"role": "user", "content": "one two three"}]}


class FixedWall(SystemClock):
    wall = staticmethod(lambda: 1_700_000_000.0)


def listen(site: Any) -> Callable[[], list[Story]]:
    """Return a function that returns the stories so far."""
    received: list[Story] = []
    site.application.generation.stories = stories = Stories([received.extend], FixedWall())

    def get_stories() -> list[Story]:
        stories.flush()
        return received

    return get_stories


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_a_whole_answer_has_its_tokens(site: Any, connect: Any, path: str) -> None:
    stories = listen(site)
    prompt = {
        CHAT: {"messages": BODY["messages"]},
        "/v1/messages": {"messages": BODY["messages"], "max_tokens": 3},
        "/v1/completions": {"prompt": "one two three"},
        "/v1/responses": {"input": "one two three"},
    }[path]
    async with connect(site.port) as client:
        client.ask("POST", path, {"model": "spoken", **prompt})
        assert (await client.answer()).status == 200
    (story,) = stories()
    assert (story.end, story.model) == ("", "words")
    assert (story.prompt_tokens, story.cached_tokens, story.output_tokens) == (3, 1, 3)
    assert story.ended_s >= story.began_s
    assert story.ended is not None
    assert 1_699_999_970.0 < story.ended.wall_s < 1_700_000_000.0


async def test_the_choices_of_all_prompts_are_one_story(site: Any, connect: Any) -> None:
    stories = listen(site)
    async with connect(site.port) as client:
        client.ask("POST", "/v1/completions", {"model": "words", "prompt": ["a b", "c d"], "n": 2})
        assert (await client.answer()).status == 200
    (story,) = stories()
    assert (story.prompts, story.options.n) == (2, 2)
    assert (story.prompt_tokens, story.output_tokens) == (4, 8)


@pytest.mark.parametrize(("fails", "code"), [("before", "no_workers"), ("after", "worker_failed")])
async def test_a_failure_is_recorded(site: Any, connect: Any, fails: str, code: str) -> None:
    stories = listen(site)
    site.processor.fails = fails
    async with connect(site.port) as client:
        client.ask("POST", CHAT, BODY)
        await client.answer()
    assert [story.end for story in stories()] == [code]


async def test_a_rejection_and_a_client_that_left_are_recorded(
    open_site: Any, connect: Any
) -> None:
    site = await open_site(max_concurrent_requests=1, max_waiting_requests=0)
    stories = listen(site)
    site.processor.gate.clear()
    async with connect(site.port) as leaves, connect(site.port) as late:
        leaves.ask("POST", CHAT, {**BODY, "stream": True})
        await site.processor.entered.wait()
        late.ask("POST", CHAT, BODY)
        assert (await late.answer()).status == 503
        assert [story.end for story in stories()] == ["overloaded"]
    await site.processor.cancelled.wait()
    while len(stories()) < 2:
        await asyncio.sleep(0)
    assert stories()[1].end == "cancelled"


@pytest.mark.parametrize(
    ("body", "code"),
    [({**BODY, "model": "unknown"}, "model_not_found"), ({"model": "words"}, "invalid_request")],
)
async def test_a_request_that_no_worker_saw_has_a_story(
    site: Any, connect: Any, body: Any, code: str
) -> None:
    stories = listen(site)
    async with connect(site.port) as client:
        client.ask("POST", CHAT, body)
        assert (await client.answer()).status >= 400
    (story,) = stories()
    assert (story.end, story.path, story.output_tokens) == (code, CHAT, 0)


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"background": True}])
async def test_the_story_of_a_response_lasts_until_it_is_stored(
    site: Any, connect: Any, monkeypatch: pytest.MonkeyPatch, fields: dict[str, bool]
) -> None:
    stories, stored, entered = listen(site), asyncio.Event(), asyncio.Event()
    name = "finish" if fields.get("background") else "add"
    store = getattr(ResponseStore, name)

    async def wait(*arguments: Any, **named: Any) -> None:
        entered.set()
        await stored.wait()
        await store(*arguments, **named)

    monkeypatch.setattr(ResponseStore, name, wait)
    async with connect(site.port) as client:
        client.ask("POST", "/v1/responses", {"model": "words", "input": "one two", **fields})
        await entered.wait()
        assert not stories()
        before_s = time.monotonic()
        stored.set()
        assert (await client.answer()).status == 200
        while not stories():
            await asyncio.sleep(0)
    (story,) = stories()
    assert (story.end, story.output_tokens) == ("", 2)
    assert story.ended_s >= before_s


async def test_requests_of_a_connection_have_stories_of_their_own(site: Any, connect: Any) -> None:
    stories = listen(site)
    async with connect(site.port) as client:
        for prompt in ("a", "a b c d"):
            body = {"model": "words", "messages": [{"role": "user", "content": prompt}]}
            client.ask("POST", CHAT, body)
            await client.answer()
        client.ask("POST", "/tokenize", {"prompt": "a b"})
        assert (await client.answer()).status == 200
    assert [story.prompt_tokens for story in stories()] == [1, 4]


@pytest.mark.parametrize(
    ("sent", "ratio", "begun"),
    [({}, 1.0, True), ({}, 0.0, False), ({}, None, False), ({"traceparent": "00-0"}, 1.0, True)],
)
async def test_a_share_of_requests_begins_a_trace(
    site: Any, connect: Any, sent: dict[str, str], ratio: float | None, begun: bool
) -> None:
    stories = listen(site)
    site.application.trace_ratio = ratio
    async with connect(site.port) as client:
        client.ask("POST", CHAT, BODY, headers=sent)
        assert ("traceparent" in (await client.answer()).headers) is begun
    (story,) = stories()
    trace_id = make_trace_id(story.request_id) if begun else ""
    assert story.ended is not None
    assert (story.ended.trace, story.ended.trace_flags) == (trace_id, None)
