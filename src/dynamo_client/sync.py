"""The client for programs without an event loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self, overload

from dynamo_client import api_requests
from dynamo_client.api_requests import JsonObject, Message, Prompt, RequestSpec
from dynamo_client.config import DynamoConfig
from dynamo_client.network import BlockingNetworkBackend, run_blocking
from dynamo_client.session import ClientSession
from dynamo_client.streams import SyncChunkStream


class SyncDynamoClient:
    """A blocking client with the methods of `DynamoClient`. The constructor does no I/O. Many
    threads may use one client at once."""

    def __init__(self, config: DynamoConfig | None = None) -> None:
        self.config = config or DynamoConfig()
        self._session = ClientSession(self.config, BlockingNetworkBackend())

    @overload
    def chat_completion(
        self,
        messages: Sequence[Message],
        model: str = ...,
        max_tokens: int | None = ...,
        temperature: float | None = ...,
        stream: Literal[False] = ...,
        **options: Any,
    ) -> JsonObject: ...
    @overload
    def chat_completion(
        self,
        messages: Sequence[Message],
        model: str = ...,
        max_tokens: int | None = ...,
        temperature: float | None = ...,
        *,
        stream: Literal[True],
        **options: Any,
    ) -> SyncChunkStream: ...
    def chat_completion(
        self,
        messages: Sequence[Message],
        model: str = "default",
        max_tokens: int | None = None,
        temperature: float | None = None,
        stream: bool = False,
        **options: Any,
    ) -> JsonObject | SyncChunkStream:
        """Like `DynamoClient.chat_completion`."""
        options |= {"max_tokens": max_tokens, "temperature": temperature}
        spec = api_requests.chat(messages, model, stream, options)
        return self._open_stream(spec) if stream else self._request(spec)

    def completion(
        self,
        prompt: Prompt,
        model: str = "default",
        max_tokens: int | None = None,
        temperature: float | None = None,
        **options: Any,
    ) -> JsonObject:
        """Like `DynamoClient.completion`."""
        options |= {"max_tokens": max_tokens, "temperature": temperature}
        return self._request(api_requests.completion(prompt, model, False, options))

    def completion_stream(
        self,
        prompt: Prompt,
        model: str = "default",
        max_tokens: int | None = None,
        temperature: float | None = None,
        **options: Any,
    ) -> SyncChunkStream:
        """Like `DynamoClient.completion_stream`."""
        options |= {"max_tokens": max_tokens, "temperature": temperature}
        return self._open_stream(api_requests.completion(prompt, model, True, options))

    def tokenize(self, text: str | Sequence[Message], model: str = "default") -> list[int]:
        """Like `DynamoClient.tokenize`."""
        return list(self._request(api_requests.tokenize(text, model))["tokens"])

    def detokenize(self, tokens: Sequence[int], model: str = "default") -> str:
        """Like `DynamoClient.detokenize`."""
        return str(self._request(api_requests.detokenize(tokens, model))["prompt"])

    def post(self, path: str, body: Any) -> JsonObject:
        """Like `DynamoClient.post`."""
        return self._request(RequestSpec(path, body))

    def list_models(self) -> list[JsonObject]:
        """Like `DynamoClient.list_models`."""
        return list(self._request(api_requests.LIST_MODELS).get("data", ()))

    def health_check(self) -> JsonObject:
        """Like `DynamoClient.health_check`."""
        return self._request(api_requests.HEALTH_CHECK, retry=False)

    def close(self) -> None:
        """Close idle connections; a later call opens new ones."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def _request(self, spec: RequestSpec, *, retry: bool = True) -> JsonObject:
        return run_blocking(self._session.request(spec, retry=retry))

    def _open_stream(self, spec: RequestSpec) -> SyncChunkStream:
        return SyncChunkStream(run_blocking(self._session.open_stream(spec)))
