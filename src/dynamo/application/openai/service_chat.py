"""Chat between services: OpenAI's request and chunks as plain values, to and from text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dynamo.application.openai.body import invalid_field_error
from dynamo.application.openai.chat import ChatBody, chat_request
from dynamo.application.openai.usage import UsageCounter
from dynamo.core.errors import InvalidRequest, ProtocolError, Unsupported
from dynamo.core.text import ChatRequest, DecodedTokenLogprob, TextFinish, TextReply
from dynamo.core.values import FinishReason, Started

FINISH_REASONS: Mapping[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "cancelled": "cancelled",
}
_OPENAI_FIELD_NAMES = {"include_stop": "include_stop_str_in_output", "salt": "cache_salt"}


def chat_request_to_dict(request: ChatRequest) -> dict[str, Any]:
    """What was asked, as OpenAI's body has it; what was not given is left out."""
    options = msgspec.to_builtins(request.options)
    sampling = options.pop("sampling", {})
    given = {key: value for key, value in sampling.items() if value is not None}
    logprobs = options.pop("top_logprobs", None)
    body = {_OPENAI_FIELD_NAMES.get(key, key): value for key, value in options.items()} | given
    if logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": logprobs}
    if request.tools:
        body["tools"] = list(request.tools)
    if request.template_args:
        body["chat_template_kwargs"] = request.template_args
    if not request.add_generation_prompt:
        body["add_generation_prompt"] = False
    return {"model": request.model, "messages": list(request.messages)} | body


def chat_request_from_dict(value: Any, model: str, unknown_roles: str) -> ChatRequest:
    """The request for a processor of `model`, out of such a body. Raises `InvalidRequest`."""
    if not isinstance(value, Mapping):
        raise InvalidRequest("a chat request is a mapping with `messages`")
    try:
        body = msgspec.convert({**value, "model": model}, ChatBody)
    except msgspec.ValidationError as error:
        raise invalid_field_error(str(error)) from None
    if body.logprobs:
        raise Unsupported("logprobs are not passed between services yet", param="logprobs")
    return chat_request(body, model, unknown_roles)


class ChatChunkReply(TextReply):
    """Text as chunks: `send(chunk)` each; False when nobody wants more."""

    def __init__(self, send: Callable[[dict[str, Any]], bool], head: dict[str, Any], n: int):
        self._send = send
        self._common_fields = head | {"object": "chat.completion.chunk"}
        self._usage_counter = UsageCounter(n)
        self._remaining_choices = n

    def prompt(self, prompt_tokens: int) -> None:
        self._usage_counter.prompt_tokens += prompt_tokens

    def begin(self, choice: int, started: Started) -> None:
        self._usage_counter.on_started(choice, started)
        self._send_chunk(
            choice, {"role": "assistant", "content": ""}, usage=self._usage_counter.to_dict()
        )

    def text(
        self, choice: int, delta: str, logprobs: Sequence[DecodedTokenLogprob] | None = None
    ) -> bool:
        del logprobs
        return self._send_chunk(choice, {"content": delta})

    def finish(self, choice: int, end: TextFinish) -> None:
        self._usage_counter.completion_tokens += end.completion_tokens
        self._remaining_choices -= 1
        more = {} if self._remaining_choices else {"usage": self._usage_counter.to_dict()}
        self._send_chunk(choice, {}, end.reason, **more)

    def _send_chunk(
        self, choice: int, delta: dict[str, str], reason: str | None = None, **more: Any
    ) -> bool:
        one = {"index": choice, "delta": delta, "finish_reason": reason}
        return self._send({**self._common_fields, "choices": [one], **more})


class ChatAnswerReply(ChatChunkReply):
    """All of one choice's text, its end and the usage."""

    def __init__(self) -> None:
        super().__init__(self._collect, {}, 1)
        self._parts: list[str] = []
        self.answer: dict[str, Any] = {}

    def _collect(self, chunk: dict[str, Any]) -> bool:
        one = chunk["choices"][0]
        self._parts.append(one["delta"].get("content", ""))
        if one["finish_reason"]:
            reason, usage = one["finish_reason"], chunk["usage"]
            text = "".join(self._parts)
            self.answer = {"content": text, "finish_reason": reason, "usage": usage}
        return True


class ChunkText(msgspec.Struct, frozen=True):
    """Text of one choice."""

    content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    """What a chunk or a completion says of one choice."""

    index: int = 0
    delta: ChunkText | None = None
    message: ChunkText | None = None
    finish_reason: str | None = None


class TokenUsage(msgspec.Struct, frozen=True):
    """Tokens, as far as they are known."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class CompletionChunk(msgspec.Struct, frozen=True):
    """What is read of OpenAI's chunk or completion."""

    choices: list[ChunkChoice] = []
    usage: TokenUsage | None = None


class ChatChunkReader:
    """What a service answers, into a reply: texts, OpenAI's chunks or a whole completion. A choice
    ends with the answer, for the service may say more after the model's end."""

    def __init__(self, reply: TextReply) -> None:
        self._reply = reply
        self._usage = TokenUsage()
        self._prompt_reported = False
        self._reasons: dict[int, FinishReason] = {}

    def receive(self, piece: Any) -> bool:
        """One item of the answer. False: the reader is gone. Raises `ProtocolError`."""
        if isinstance(piece, str):
            return self._forward_text(0, piece)
        try:
            chunk = msgspec.convert(piece, CompletionChunk)
        except msgspec.ValidationError as error:
            raise ProtocolError(
                f"a chat answers with texts or with OpenAI's chunks: {error}"
            ) from None
        self._usage = chunk.usage or self._usage
        wanted = True
        for one in chunk.choices:
            said = one.delta or one.message or ChunkText()
            wanted = self._forward_text(one.index, said.content or "") and wanted
            if one.finish_reason:
                self._reasons[one.index] = FINISH_REASONS.get(one.finish_reason, "stop")
        return wanted

    def end(self) -> None:
        """The answer is complete."""
        if not self._reasons:
            self._begin_choice(0)
        self._report_prompt()
        tokens = self._usage.completion_tokens
        for choice, reason in self._reasons.items():
            self._reply.finish(choice, TextFinish(reason, tokens))
            tokens = 0  # the usage is that of all choices

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
        """The prompt's length, as soon as anybody said it."""
        if not self._prompt_reported:
            self._prompt_reported = True
            self._reply.prompt(self._usage.prompt_tokens)
