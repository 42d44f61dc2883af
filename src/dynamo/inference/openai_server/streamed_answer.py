"""The stream of another server's answer: its events, its usage, its end, and its errors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from dynamo.communication.http.client import EventStream, HttpAnswer
from dynamo.core.errors import (
    ContextLengthExceeded,
    DynamoError,
    Forbidden,
    InvalidRequest,
    Overloaded,
    Unauthorized,
    WorkerFailed,
)
from dynamo.core.reply import Reply
from dynamo.core.values import EngineTotals, FinishReason, Started
from dynamo.inference.openai_server.server_facts import excerpt

DONE = b"[DONE]"


class PromptDetails(msgspec.Struct):
    """The part of the usage that says what was cached."""

    cached_tokens: int | None = None


class AnswerDetails(msgspec.Struct):
    """The part of the usage that says how many tokens were reasoning."""

    reasoning_tokens: int | None = None


class Usage(msgspec.Struct):
    """Counts of tokens at the end of an answer."""

    completion_tokens: int = 0
    prompt_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: AnswerDetails | None = None


class AnswerChunk(Protocol):
    """An event of a streamed answer."""

    @property
    def choices(self) -> Sequence[Any]:
        """The parts of the choices."""

    usage: Usage | None
    error: Any


class StreamedAnswer:
    """Delivers the events of one answer to `reply`, and counts them in `totals`."""

    def __init__(
        self,
        prompt_tokens: int,
        reply: Reply,
        totals: EngineTotals,
        decode: Callable[[bytes], AnswerChunk],
    ) -> None:
        self._prompt_tokens = prompt_tokens
        self._reply = reply
        self._totals = totals
        self._decode = decode
        totals.requests += 1
        totals.prompt_tokens += prompt_tokens
        self._events = EventStream()
        self._begun = False
        self.tokens_delivered = 0
        """Tokens, or parts of text, that have come so far."""
        self.cached_tokens: int | None = None
        """Prompt tokens from the server's cache; None until it says so at the end."""
        self._usage = Usage()
        self._reason = ""
        self.ended = False
        """Whether the reply is finished, or has enough."""

    def on_data(self, part: bytes) -> bool:
        """Deliver a part of the body. False: the answer has ended. Raises `WorkerFailed` for what
        is no event of an answer, and the error of an event as `map_error` returns it."""
        for event in self._events.feed(part):
            if event == DONE:
                self._end()
                return True  # the connection can be used again once the body ends
            try:
                chunk = self._decode(event)
            except (msgspec.DecodeError, UnicodeDecodeError):
                raise WorkerFailed(f"the server sent no completion: {excerpt(event)}") from None
            if chunk.error is not None:
                code = chunk.error.get("code") if isinstance(chunk.error, dict) else None
                status = code if isinstance(code, int) and 400 <= code < 600 else 500
                raise map_error(status, msgspec.json.encode(chunk.error), {})
            self._totals.steps += 1
            if not self._deliver(chunk):
                self.ended = True
                return False
        return True

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that the server still has to compute, as far as known."""
        return 0 if self.tokens_delivered else self._prompt_tokens

    def begin(self, cached_tokens: int) -> None:
        """Begin the reply, unless it has begun."""
        if not self._begun:
            self._begun = True
            self._reply.begin(Started("", cached_tokens, self._prompt_tokens))

    @abstractmethod
    def _deliver_choice(self, choice: Any) -> bool:
        """Deliver a part of the choice. False: the reply has enough."""

    @abstractmethod
    def _finish(self, reason: FinishReason) -> None:
        """Finish the reply."""

    def _deliver(self, chunk: AnswerChunk) -> bool:
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            self.begin(cached_tokens=0)
            self._reason = choice.finish_reason or self._reason
            if not self._deliver_choice(choice):
                return False
        return True

    def _end(self) -> None:
        if self.ended:
            return
        if not self._reason:
            raise WorkerFailed("the server ended an answer without a finish_reason")
        if self._reason in {"abort", "error"}:
            raise WorkerFailed(f"the server ended an answer with finish_reason {self._reason!r}")
        self.begin(cached_tokens=0)
        details = self._usage.prompt_tokens_details
        self.cached_tokens = details.cached_tokens if details is not None else None
        self._totals.cached_tokens += self.cached_tokens or 0
        self.ended = True
        self._finish("length" if self._reason == "length" else "stop")


def map_error(status: int, body: bytes, headers: Any) -> DynamoError:
    """Return the error of a server as one of ours. 429 and 503 keep their Retry-After. No 4xx
    is a `WorkerFailed`, since the server is alive. `Unauthorized` and `Forbidden` concern the key.
    """
    text = body.decode("utf-8", "replace")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        value = {}
    error = value.get("error", value) if isinstance(value, dict) else {}
    message, code = text[:300], ""
    if isinstance(error, dict):
        message = str(error.get("message", message))
        code = f"{error.get('code', '')} {error.get('type', '')}"
    if status in {429, 503}:
        retry = headers.get("retry-after", "")
        after = float(retry) if retry.replace(".", "", 1).isdecimal() else None
        return Overloaded(f"the server is overloaded: {message}", retry_after_s=after)
    if status in {400, 413, 422}:
        too_long = "context" in code or "context length" in message or "context size" in message
        return (ContextLengthExceeded if too_long else InvalidRequest)(message)
    if status in {401, 403}:
        refusal = f"the server refuses the key ({status}): {message}"
        return (Unauthorized if status == 401 else Forbidden)(refusal)
    if status in {408, 409, 425}:
        return Overloaded(f"the server asks to send the request again ({status}): {message}")
    if 400 <= status < 500:
        return InvalidRequest(f"the server refuses the request ({status}): {message}")
    return WorkerFailed(f"the server answers {status}: {message}")


def check_answer(answer: HttpAnswer) -> None:
    """Raise the error of an answer that is not 200."""
    if answer.status != 200:
        raise map_error(answer.status, answer.body, answer.headers)
