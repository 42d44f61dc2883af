"""The client for programs that run an event loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self, overload

from dynamo_client import api_requests
from dynamo_client.api_requests import JsonObject, Message, Prompt, RequestSpec
from dynamo_client.config import DynamoConfig
from dynamo_client.session import ClientSession
from dynamo_client.streams import ChunkStream


class DynamoClient:
    """An asyncio client: `async with DynamoClient(config) as client`. The constructor does no I/O.
    Many tasks may use one client at once."""

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
    async def chat_completion(
        self,
        messages: Sequence[Message],
        model: str = "default",
        max_tokens: int | None = None,
        temperature: float | None = None,
        stream: bool = False,
        **options: Any,
    ) -> JsonObject | ChunkStream:
        """Return the answer, or with `stream` its chunks. Raises `DynamoError`. `options` are
        further fields of the request. `request_id` is sent as a header."""
        options |= {"max_tokens": max_tokens, "temperature": temperature}
        spec = api_requests.chat(messages, model, stream, options)
        return await (self._open_stream(spec) if stream else self._session.request(spec))

    async def completion(
        self,
        prompt: Prompt,
        model: str = "default",
        max_tokens: int | None = None,
        temperature: float | None = None,
        **options: Any,
    ) -> JsonObject:
        """Continue a text, several texts, or token ids. Raises `DynamoError`."""
        options |= {"max_tokens": max_tokens, "temperature": temperature}
        return await self._session.request(api_requests.completion(prompt, model, False, options))

    async def completion_stream(
        self,
        prompt: Prompt,
        model: str = "default",
        max_tokens: int | None = None,
        temperature: float | None = None,
        **options: Any,
    ) -> ChunkStream:
        """Like `completion`, chunk by chunk. Raises `DynamoError`."""
        options |= {"max_tokens": max_tokens, "temperature": temperature}
        return await self._open_stream(api_requests.completion(prompt, model, True, options))

    async def tokenize(self, text: str | Sequence[Message], model: str = "default") -> list[int]:
        """Return the token ids of a text or of a conversation. Raises `DynamoError`."""
        reply = await self._session.request(api_requests.tokenize(text, model))
        return list(reply["tokens"])

    async def detokenize(self, tokens: Sequence[int], model: str = "default") -> str:
        """Return the text of `tokens`. Raises `DynamoError`."""
        reply = await self._session.request(api_requests.detokenize(tokens, model))
        return str(reply["prompt"])

    async def post(self, path: str, body: Any) -> JsonObject:
        """Send `body` to any route and return the JSON answer. Raises `DynamoError`."""
        return await self._session.request(RequestSpec(path, body))

    async def list_models(self) -> list[JsonObject]:
        """Return the served models. Raises `DynamoError`."""
        return list((await self._session.request(api_requests.LIST_MODELS)).get("data", ()))

    async def health_check(self) -> JsonObject:
        """Return the server's health, without retries. Raises `DynamoAPIError` if unhealthy."""
        return await self._session.request(api_requests.HEALTH_CHECK, retry=False)

    async def close(self) -> None:
        """Close idle connections; a later call opens new ones."""
        self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._session.close()

    async def _open_stream(self, spec: RequestSpec) -> ChunkStream:
        return ChunkStream(await self._session.open_stream(spec))
