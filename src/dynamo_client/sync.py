"""The client for programs without an event loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self, overload

from dynamo_client import calls
from dynamo_client.blocking import BlockingNetwork
from dynamo_client.calls import Message, Prompt
from dynamo_client.config import DynamoConfig
from dynamo_client.network import finish
from dynamo_client.session import Ask, Session
from dynamo_client.streams import SyncStream

Answer = dict[str, Any]


class SyncDynamoClient:
    """`with SyncDynamoClient(config) as client`. Made without I/O; serves many threads at once."""

    def __init__(self, config: DynamoConfig | None = None) -> None:
        self.config = config or DynamoConfig()
        self._session = Session(self.config, BlockingNetwork())

    @overload
    def chat_completion(
        self,
        messages: Sequence[Message],
        model: str = ...,
        max_tokens: int | None = ...,
        temperature: float | None = ...,
        stream: Literal[False] = ...,
        **options: Any,
    ) -> Answer: ...
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
    ) -> SyncStream: ...
    @overload
    def chat_completion(
        self,
        messages: Sequence[Message],
        model: str,
        max_tokens: int | None,
        temperature: float | None,
        stream: Literal[True],
        **options: Any,
    ) -> SyncStream: ...
    def chat_completion(
        self,
        messages: Sequence[Message],
        model: str = "default",
        max_tokens: int | None = None,
        temperature: float | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Answer | SyncStream:
        """The answer, or with `stream` its chunks. `options`: any other field of the request;
        `request_id` becomes a header. Raises `DynamoError`."""
        options |= {"max_tokens": max_tokens, "temperature": temperature}
        ask = calls.chat(messages, model, stream, options)
        return self._stream(ask) if stream else self._answer(ask)

    def completion(
        self,
        prompt: Prompt,
        model: str = "default",
        max_tokens: int | None = None,
        temperature: float | None = None,
        **options: Any,
    ) -> Answer:
        """What follows a text, several texts, or token ids. Raises `DynamoError`."""
        options |= {"max_tokens": max_tokens, "temperature": temperature}
        return self._answer(calls.completion(prompt, model, False, options))

    def completion_stream(
        self,
        prompt: Prompt,
        model: str = "default",
        max_tokens: int | None = None,
        temperature: float | None = None,
        **options: Any,
    ) -> SyncStream:
        """The same, chunk by chunk. Raises `DynamoError`."""
        options |= {"max_tokens": max_tokens, "temperature": temperature}
        return self._stream(calls.completion(prompt, model, True, options))

    def tokenize(self, text: str | Sequence[Message], model: str = "default") -> list[int]:
        """Token ids of a text or of a conversation. Raises `DynamoError`."""
        found = self._answer(calls.tokenize(text, model))
        return list(found["tokens"])

    def detokenize(self, tokens: Sequence[int], model: str = "default") -> str:
        """Their text. Raises `DynamoError`."""
        found = self._answer(calls.detokenize(tokens, model))
        return str(found["prompt"])

    def post(self, path: str, body: Any) -> Answer:
        """The JSON that any other route answers. Raises `DynamoError`."""
        return self._answer(Ask(path, body))

    def list_models(self) -> list[Answer]:
        """What is served. Raises `DynamoError`."""
        found = self._answer(calls.MODELS)
        return list(found.get("data", ()))

    def health_check(self) -> Answer:
        """How the server is now; asked once. Raises `DynamoAPIError` when it is not well."""
        found: Answer = finish(self._session.ask(calls.HEALTH, again=False))
        return found

    def close(self) -> None:
        """Close idle connections; a later call opens new ones."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def _answer(self, ask: Ask) -> Answer:
        found: Answer = finish(self._session.ask(ask))
        return found

    def _stream(self, ask: Ask) -> SyncStream:
        return SyncStream(finish(self._session.open(ask)))
