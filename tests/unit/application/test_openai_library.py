"""The official OpenAI client against the HTTP application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

HI: Any = [{"role": "user", "content": "one two three"}]


@pytest.fixture
async def client(site: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=site.url + "/v1", api_key="k", max_retries=0
    ) as openai_client:
        yield openai_client


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="words", messages=HI)
    assert answer.choices[0].message.content == "one two three "
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


async def test_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="words", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert [text for text in texts if text] == ["one ", "two ", "three "]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 6


async def test_stream_that_fails(client: openai.AsyncOpenAI, site: Any) -> None:
    site.processor.fails = "after"
    stream = await client.chat.completions.create(model="words", messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="the worker died"):
        async for _ in stream:
            pass


async def test_closing_a_stream_cancels_the_request(client: openai.AsyncOpenAI, site: Any) -> None:
    stream = await client.chat.completions.create(
        model="words", messages=HI, stream=True, max_tokens=10_000_000
    )
    await anext(aiter(stream))
    await stream.close()
    await site.processor.cancelled.wait()


async def test_completions_and_models(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="words", prompt=["a", "b"], logprobs=1)
    assert [choice.text for choice in answer.choices] == ["a ", "b "]
    assert [model.id async for model in client.models.list()] == ["words", "spoken"]
    assert (await client.models.retrieve("words")).owned_by == "dynamo"


async def test_errors_raise_the_exceptions_of_the_library(
    client: openai.AsyncOpenAI, site: Any
) -> None:
    with pytest.raises(openai.NotFoundError, match="words") as missing:
        await client.chat.completions.create(model="none", messages=HI)
    assert missing.value.code == "model_not_found"
    assert missing.value.param == "model"
    assert missing.value.request_id
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="words", messages=HI, temperature=9)
    assert bad.value.param == "temperature"
    site.processor.fails = "before"
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model="words", messages=HI)
