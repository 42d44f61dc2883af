"""Chat between services: OpenAI's requests and chunks as plain values, and as text replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

import msgspec

from dynamo.application.items import AnswerChoice, AnswerItem, ItemReply, Logprobs, UsageCounter
from dynamo.application.openai.body import invalid_field_error
from dynamo.application.openai.chat import ChatBody, chat_parts, chat_request
from dynamo.application.openai.structured import structured_output_fields
from dynamo.application.openai.writer import REASONING_FIELDS, message_fields, text_of, usage_fields
from dynamo.core.errors import InvalidRequest, ProtocolError, Unsupported
from dynamo.core.text import (
    ArgumentsDelta,
    CallBegun,
    CallEnded,
    ChatRequest,
    ReasoningDelta,
    TextFinish,
    TextReply,
)
from dynamo.core.values import FinishReason, Started

FINISH_REASONS: Mapping[str, FinishReason] = {name: name for name in get_args(FinishReason)}
_OPENAI_FIELD_NAMES = {"include_stop": "include_stop_str_in_output", "salt": "cache_salt"}


def chat_request_to_dict(request: ChatRequest) -> dict[str, Any]:
    """Return a request as OpenAI's body; absent options are left out."""
    options = msgspec.to_builtins(request.options)
    sampling = options.pop("sampling", {})
    overrides = {key: value for key, value in sampling.items() if value is not None}
    logprobs = options.pop("top_logprobs", None)
    options.pop("structured", None)
    options.pop("count_tokens", None)
    body = {_OPENAI_FIELD_NAMES.get(key, key): value for key, value in options.items()}
    body |= overrides
    if logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": logprobs}
    if request.options.structured is not None:
        body |= structured_output_fields(request.options.structured)
    if request.tools:
        body["tools"] = list(request.tools)
        body |= request.tool_options()
    if request.template_args:
        body["chat_template_kwargs"] = request.template_args
    if not request.add_generation_prompt:
        body["add_generation_prompt"] = False
    if request.continue_final:
        body["continue_final_message"] = True
    return {"model": request.model, "messages": list(request.messages)} | body


def chat_request_from_dict(value: Any, model: str, unknown_roles: str) -> ChatRequest:
    """Return the request for a processor of `model`. Raises `InvalidRequest`, `Unsupported`."""
    if not isinstance(value, Mapping):
        raise InvalidRequest("a chat request must be a mapping with `messages`")
    try:
        body = msgspec.convert({**value, "model": model}, ChatBody)
    except msgspec.ValidationError as error:
        raise invalid_field_error(str(error)) from None
    if body.logprobs or body.prompt_logprobs is not None:
        raise Unsupported("logprobs are not passed between services yet", param="logprobs")
    return chat_request(chat_parts(body), model, unknown_roles)


class ChatChunkReply(ItemReply):
    """Sends items as OpenAI's chunks. `send(chunk)` returns False when the caller has enough."""

    def __init__(self, send: Callable[[dict[str, Any]], bool], head: dict[str, Any], n: int):
        super().__init__(UsageCounter(n), n)
        self._send = send
        self._common_fields = head | {"object": "chat.completion.chunk"}

    def begin(self, choice: int, started: Started) -> None:
        super().begin(choice, started)
        self._send_chunk(
            choice, {"role": "assistant", "content": ""}, usage=usage_fields(self._usage)
        )

    def restart(self, choice: int) -> bool:
        del choice
        return False

    def finish(self, choice: int, end: TextFinish) -> None:
        super().finish(choice, end)
        more = {} if self.remaining_choices else {"usage": usage_fields(self._usage)}
        self._send_chunk(choice, {}, end.reason, **more)

    def _begin_item(self, answer: AnswerChoice, item: AnswerItem) -> AnswerItem:
        if item.kind == "call":
            call = {"index": item.call, "id": item.call_id, "type": "function"}
            call["function"] = {"name": item.name, "arguments": ""}
            self._send_chunk(answer.index, {"tool_calls": [call]})
        return super()._begin_item(answer, item)

    def _add_delta(self, item: AnswerItem, delta: str, logprobs: Logprobs = None) -> bool:
        del logprobs
        fields: dict[str, Any] = {"content": delta}
        if item.kind == "reasoning":
            fields = dict.fromkeys(REASONING_FIELDS, delta)
        elif item.kind == "refusal":
            fields = {"refusal": delta}
        elif item.kind == "call":
            fields = {"tool_calls": [{"index": item.call, "function": {"arguments": delta}}]}
        return self._send_chunk(item.choice, fields)

    def _send_chunk(
        self, choice: int, delta: dict[str, Any], reason: str | None = None, **more: Any
    ) -> bool:
        item = {"index": choice, "delta": delta, "finish_reason": reason}
        return self._send({**self._common_fields, "choices": [item], **more})


class ChatAnswerReply(ItemReply):
    """Collects the message, finish reason and usage of one choice in `answer`."""

    def __init__(self) -> None:
        super().__init__(UsageCounter(1), 1)
        self.answer: dict[str, Any] = {}

    def finish(self, choice: int, end: TextFinish) -> None:
        super().finish(choice, end)
        answer = self.choices[choice]
        text, usage = text_of(answer, "text"), usage_fields(self._usage)
        self.answer = {"content": text, "finish_reason": end.reason, "usage": usage}
        self.answer |= message_fields(answer, REASONING_FIELDS)


class ChunkFunction(msgspec.Struct, frozen=True):
    """The function of a call, or a part of its arguments."""

    name: str | None = None
    arguments: str | None = None


class ChunkCall(msgspec.Struct, frozen=True):
    """A tool call or a part of one; without `index` in a whole answer."""

    index: int | None = None
    id: str | None = None
    function: ChunkFunction = ChunkFunction()


class ChunkText(msgspec.Struct, frozen=True):
    """The text, reasoning and calls of one choice."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ChunkCall] | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    """A choice of a chunk or of a completion, of a chat or of a prompt (`text`)."""

    index: int = 0
    text: str | None = None
    delta: ChunkText | None = None
    message: ChunkText | None = None
    finish_reason: str | None = None


class TokenUsage(msgspec.Struct, frozen=True):
    """Token counts; 0 where unknown."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class CompletionChunk(msgspec.Struct, frozen=True):
    """The fields that are read from OpenAI's chunk or completion."""

    choices: list[ChunkChoice] = []
    usage: TokenUsage | None = None


class ChatChunkReader:
    """Passes a service's answer to a reply: texts, OpenAI's chunks or a complete completion.

    A choice ends with the whole answer, because a service may add text after the model's end. If
    the request wants one choice (`n`), indices are not read: some services number chunks by them.
    """

    def __init__(self, reply: TextReply, n: int = 1) -> None:
        self._reply = reply
        self._n = n
        self._usage = TokenUsage()
        self._prompt_reported = False
        self._reasons: dict[int, FinishReason] = {}
        self._calls: dict[int, list[int]] = {}
        self._with_arguments: set[int] = set()

    def receive(self, item: Any) -> bool:
        """Pass one item on. Returns False if the reader is gone. Raises `ProtocolError`."""
        if isinstance(item, str):
            return self._forward_text(0, item)
        try:
            chunk = msgspec.convert(item, CompletionChunk)
        except msgspec.ValidationError as error:
            message = f"a chat must answer with texts or with OpenAI's chunks: {error}"
            raise ProtocolError(message) from None
        self._usage = chunk.usage or self._usage
        reader_open = True
        for choice in chunk.choices:
            index = choice.index if self._n > 1 else 0
            if not 0 <= index < self._n:
                raise ProtocolError(f"an answer with {self._n} choices has one of index {index}")
            text = choice.delta or choice.message or ChunkText(choice.text)
            reader_open = self._forward(index, text) and reader_open
            if choice.finish_reason:
                self._reasons[index] = FINISH_REASONS.get(choice.finish_reason, "stop")
        return reader_open

    def end(self) -> None:
        """End all choices: the answer is complete."""
        if not self._reasons:
            self._begin_choice(0)
        self._report_prompt()
        tokens = self._usage.completion_tokens
        for choice, reason in self._reasons.items():
            calls = self._calls.get(choice, []) if reason == "stop" else []
            if calls:
                self._end_call(choice, calls[-1])
            self._reply.finish(choice, TextFinish("tool_calls" if calls else reason, tokens))
            tokens = 0  # the first choice carries the usage of all

    def _forward(self, choice: int, part: ChunkText) -> bool:
        reasoning = part.reasoning_content or part.reasoning
        if reasoning:
            self._begin_choice(choice)
            self._reply.event(choice, ReasoningDelta(reasoning))
        reader_open = self._forward_text(choice, part.content or "")
        for number, call in enumerate(part.tool_calls or ()):
            reader_open = self._forward_call(choice, number, call) and reader_open
        return reader_open

    def _forward_call(self, choice: int, number: int, call: ChunkCall) -> bool:
        """Pass a call on. Chunks tell no end: calls end before the next one or with the answer."""
        index = number if call.index is None else call.index
        known = self._calls.setdefault(choice, [])
        reply, function = self._reply, call.function
        reader_open = True
        if index not in known:
            if known:
                self._end_call(choice, known[-1])
            known.append(index)
            self._with_arguments.discard(choice)
            reader_open = reply.event(choice, CallBegun(index, call.id or "", function.name or ""))
        if function.arguments:
            self._with_arguments.add(choice)
            reader_open = reply.event(choice, ArgumentsDelta(index, function.arguments))
        return reader_open

    def _end_call(self, choice: int, index: int) -> None:
        if choice not in self._with_arguments:
            self._reply.event(choice, ArgumentsDelta(index, "{}"))
        self._reply.event(choice, CallEnded(index))

    def _forward_text(self, choice: int, text: str) -> bool:
        self._begin_choice(choice)
        return self._reply.text(choice, text) if text else True

    def _begin_choice(self, choice: int) -> None:
        if choice in self._reasons:
            return
        self._reasons[choice] = "stop"
        if self._usage.prompt_tokens:
            self._report_prompt()
        self._reply.begin(choice, Started())

    def _report_prompt(self) -> None:
        if not self._prompt_reported:
            self._prompt_reported = True
            self._reply.prompt(self._usage.prompt_tokens)
