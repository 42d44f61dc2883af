"""The client for programs that run an event loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self, overload

from dynamo_client import api_requests
from dynamo_client.api_requests import Message, Prompt
from dynamo_client.config import DynamoConfig
from dynamo_client.session import ClientSession, RequestSpec
from dynamo_client.streams import ChunkStream

JsonObject = dict[str, Any]


class DynamoClient:
    """`async with DynamoClient(config) as client`. Made without I/O; serves many tasks at once."""

    def __init__(self, config: DynamoConfig | None = None) -> None:
        from dynamo_client.aio import AsyncNetworkBackend  # asyncio takes long to import

        self.config = config or DynamoConfig()
        self._session = ClientSession(self.config, AsyncNetworkBackend())

    @overload
    async def chat_completion(
        self,
        messages: Sequence[Message],
        model: str = ...,
        max_tokens: int | None = ...,
        temperature: float | None = ...,
        stream: Literal[False] = ...,
        **options: Any,
    ) -> JsonObject: ...
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
    ) -> ChunkStream: ...
    @overload
    async def chat_completion(
        self,
        messages: Sequence[Message],
        model: str,
        max_tokens: int | None,
        temperature: float | None,
        stream: Literal[True],
        **options: Any,
    ) -> ChunkStream: ...
    async def chat_completion(
        self,
        messages: Sequence[Message],
        model: str = "default",
        max_tokens: int | None = None,
        temperature: float | None = None,
        stream: bool = False,
        **options: Any,
    ) -> JsonObject | ChunkStream:
        """The answer, or with `stream` its chunks. `options`: any other field of the request;
        `request_id` becomes a header. Raises `DynamoError`."""
        options |= {"max_tokens": max_tokens, "temperature": temperature}
        ask = api_requests.chat(messages, model, stream, options)
        return await (self._open_stream(ask) if stream else self._request(ask))

    async def completion(
        self,
        prompt: Prompt,
        model: str = "default",
        max_tokens: int | None = None,
        temperature: float | None = None,
        **options: Any,
    ) -> JsonObject:
        """What follows a text, several texts, or token ids. Raises `DynamoError`."""
        options |= {"max_tokens": max_tokens, "temperature": temperature}
        return await self._request(api_requests.completion(prompt, model, False, options))

    async def completion_stream(
        self,
        prompt: Prompt,
        model: str = "default",
        max_tokens: int | None = None,
        temperature: float | None = None,
        **options: Any,
    ) -> ChunkStream:
        """The same, chunk by chunk. Raises `DynamoError`."""
        options |= {"max_tokens": max_tokens, "temperature": temperature}
        return await self._open_stream(api_requests.completion(prompt, model, True, options))

    async def tokenize(self, text: str | Sequence[Message], model: str = "default") -> list[int]:
        """Token ids of a text or of a conversation. Raises `DynamoError`."""
        found = await self._request(api_requests.tokenize(text, model))
        return list(found["tokens"])

    async def detokenize(self, tokens: Sequence[int], model: str = "default") -> str:
        """Their text. Raises `DynamoError`."""
        found = await self._request(api_requests.detokenize(tokens, model))
        return str(found["prompt"])

    async def post(self, path: str, body: Any) -> JsonObject:
        """The JSON that any other route answers. Raises `DynamoError`."""
        return await self._request(RequestSpec(path, body))

    async def list_models(self) -> list[JsonObject]:
        """What is served. Raises `DynamoError`."""
        found = await self._request(api_requests.LIST_MODELS)
        return list(found.get("data", ()))

    async def health_check(self) -> JsonObject:
        """How the server is now; asked once. Raises `DynamoAPIError` when it is not well."""
        found: JsonObject = await self._session.request(api_requests.HEALTH_CHECK, retry=False)
        return found

    async def close(self) -> None:
        """Close idle connections; a later call opens new ones."""
        self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._session.close()

    async def _request(self, ask: RequestSpec) -> JsonObject:
        found: JsonObject = await self._session.request(ask)
        return found

    async def _open_stream(self, ask: RequestSpec) -> ChunkStream:
        return ChunkStream(await self._session.open_stream(ask))
