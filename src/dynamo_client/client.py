"""The client for programs that run an event loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self, overload

from dynamo_client import calls
from dynamo_client.calls import Message, Prompt
from dynamo_client.config import DynamoConfig
from dynamo_client.session import Ask, Session
from dynamo_client.streams import Stream

Answer = dict[str, Any]


class DynamoClient:
    """`async with DynamoClient(config) as client`. Made without I/O; serves many tasks at once."""

    def __init__(self, config: DynamoConfig | None = None) -> None:
        from dynamo_client.aio import AsyncNetwork  # asyncio takes long to import

        self.config = config or DynamoConfig()
        self._session = Session(self.config, AsyncNetwork())

    @overload
    async def chat_completion(
        self,
        messages: Sequence[Message],
        model: str = ...,
        max_tokens: int | None = ...,
        temperature: float | None = ...,
        stream: Literal[False] = ...,
        **options: Any,
    ) -> Answer: ...
    @overload
    async def chat_completion(
        self,
        messages: Sequence[Message],
        model: str = ...,
        max_tokens: int | None = ...,
        temperature: float | None = ...,
        *,
        stream: Literal[True],
        **options: Any,
    ) -> Stream: ...
    @overload
    async def chat_completion(
        self,
        messages: Sequence[Message],
        model: str,
        max_tokens: int | None,
        temperature: float | None,
        stream: Literal[True],
        **options: Any,
    ) -> Stream: ...
    async def chat_completion(
        self,
        messages: Sequence[Message],
        model: str = "default",
        max_tokens: int | None = None,
        temperature: float | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Answer | Stream:
        """The answer, or with `stream` its chunks. `options`: any other field of the request;
        `request_id` becomes a header. Raises `DynamoError`."""
        options |= {"max_tokens": max_tokens, "temperature": temperature}
        ask = calls.chat(messages, model, stream, options)
        return await (self._stream(ask) if stream else self._answer(ask))

    async def completion(
        self,
        prompt: Prompt,
        model: str = "default",
        max_tokens: int | None = None,
        temperature: float | None = None,
        **options: Any,
    ) -> Answer:
        """What follows a text, several texts, or token ids. Raises `DynamoError`."""
        options |= {"max_tokens": max_tokens, "temperature": temperature}
        return await self._answer(calls.completion(prompt, model, False, options))

    async def completion_stream(
        self,
        prompt: Prompt,
        model: str = "default",
        max_tokens: int | None = None,
        temperature: float | None = None,
        **options: Any,
    ) -> Stream:
        """The same, chunk by chunk. Raises `DynamoError`."""
        options |= {"max_tokens": max_tokens, "temperature": temperature}
        return await self._stream(calls.completion(prompt, model, True, options))

    async def tokenize(self, text: str | Sequence[Message], model: str = "default") -> list[int]:
        """Token ids of a text or of a conversation. Raises `DynamoError`."""
        found = await self._answer(calls.tokenize(text, model))
        return list(found["tokens"])

    async def detokenize(self, tokens: Sequence[int], model: str = "default") -> str:
        """Their text. Raises `DynamoError`."""
        found = await self._answer(calls.detokenize(tokens, model))
        return str(found["prompt"])

    async def post(self, path: str, body: Any) -> Answer:
        """The JSON that any other route answers. Raises `DynamoError`."""
        return await self._answer(Ask(path, body))

    async def list_models(self) -> list[Answer]:
        """What is served. Raises `DynamoError`."""
        found = await self._answer(calls.MODELS)
        return list(found.get("data", ()))

    async def health_check(self) -> Answer:
        """How the server is now; asked once. Raises `DynamoAPIError` when it is not well."""
        found: Answer = await self._session.ask(calls.HEALTH, again=False)
        return found

    async def close(self) -> None:
        """Close idle connections; a later call opens new ones."""
        self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._session.close()

    async def _answer(self, ask: Ask) -> Answer:
        found: Answer = await self._session.ask(ask)
        return found

    async def _stream(self, ask: Ask) -> Stream:
        return Stream(await self._session.open(ask))
