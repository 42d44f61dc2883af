"""The client for programs without an event loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self, overload

from dynamo_client import api_requests
from dynamo_client.api_requests import Message, Prompt
from dynamo_client.blocking import BlockingNetworkBackend
from dynamo_client.config import DynamoConfig
from dynamo_client.network import run_blocking
from dynamo_client.session import ClientSession, RequestSpec
from dynamo_client.streams import SyncChunkStream

JsonObject = dict[str, Any]


class SyncDynamoClient:
    """`with SyncDynamoClient(config) as client`. Made without I/O; serves many threads at once."""

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
    @overload
    def chat_completion(
        self,
        messages: Sequence[Message],
        model: str,
        max_tokens: int | None,
        temperature: float | None,
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
        """The answer, or with `stream` its chunks. `options`: any other field of the request;
        `request_id` becomes a header. Raises `DynamoError`."""
        options |= {"max_tokens": max_tokens, "temperature": temperature}
        ask = api_requests.chat(messages, model, stream, options)
        return self._open_stream(ask) if stream else self._request(ask)

    def completion(
        self,
        prompt: Prompt,
        model: str = "default",
        max_tokens: int | None = None,
        temperature: float | None = None,
        **options: Any,
    ) -> JsonObject:
        """What follows a text, several texts, or token ids. Raises `DynamoError`."""
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
        """The same, chunk by chunk. Raises `DynamoError`."""
        options |= {"max_tokens": max_tokens, "temperature": temperature}
        return self._open_stream(api_requests.completion(prompt, model, True, options))

    def tokenize(self, text: str | Sequence[Message], model: str = "default") -> list[int]:
        """Token ids of a text or of a conversation. Raises `DynamoError`."""
        found = self._request(api_requests.tokenize(text, model))
        return list(found["tokens"])

    def detokenize(self, tokens: Sequence[int], model: str = "default") -> str:
        """Their text. Raises `DynamoError`."""
        found = self._request(api_requests.detokenize(tokens, model))
        return str(found["prompt"])

    def post(self, path: str, body: Any) -> JsonObject:
        """The JSON that any other route answers. Raises `DynamoError`."""
        return self._request(RequestSpec(path, body))

    def list_models(self) -> list[JsonObject]:
        """What is served. Raises `DynamoError`."""
        found = self._request(api_requests.LIST_MODELS)
        return list(found.get("data", ()))

    def health_check(self) -> JsonObject:
        """How the server is now; asked once. Raises `DynamoAPIError` when it is not well."""
        found: JsonObject = run_blocking(
            self._session.request(api_requests.HEALTH_CHECK, retry=False)
        )
        return found

    def close(self) -> None:
        """Close idle connections; a later call opens new ones."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def _request(self, ask: RequestSpec) -> JsonObject:
        found: JsonObject = run_blocking(self._session.request(ask))
        return found

    def _open_stream(self, ask: RequestSpec) -> SyncChunkStream:
        return SyncChunkStream(run_blocking(self._session.open_stream(ask)))
