"""The body of /v1/chat/completions and the template of its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dynamo.application.openai.body import decode_body
from dynamo.application.openai.chat_messages import normalise_messages
from dynamo.application.openai.generation_body import (
    MAX_NAME_BYTES,
    GenerationBody,
    Neutral,
    UnsupportedFields,
    check_size,
    text_options,
)
from dynamo.application.openai.logprobs import chat_logprobs
from dynamo.application.openai.tools import check_tools
from dynamo.application.openai.writer import ResponseTemplate
from dynamo.communication.http import Request
from dynamo.core.errors import DynamoError, InvalidRequest
from dynamo.core.text import CallMode, ChatRequest

MAX_TEMPLATE_ARGS = 64
THINKING_OFF = {"enable_thinking": False, "thinking": False}
"""Arguments by which templates turn thinking off: Qwen's and GLM's, DeepSeek's and Kimi's. Other
templates ignore both."""
FREE: CallMode = "free"


class ChatBody(GenerationBody, kw_only=True):
    """OpenAI's chat request, with vLLM's additions."""

    messages: list[dict[str, Any]]
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    audio: Annotated[Any, Neutral()] = None
    modalities: Annotated[Any, Neutral(["text"])] = None
    functions: Annotated[Any, Neutral([])] = None
    function_call: Annotated[Any, Neutral("none")] = None
    web_search_options: Annotated[Any, Neutral()] = None
    echo: Annotated[Any, Neutral(False)] = None
    add_special_tokens: Annotated[Any, Neutral(False)] = None
    chat_template: Annotated[Any, Neutral()] = None
    documents: Annotated[Any, Neutral([])] = None


class FieldNames:
    """Renames the fields in errors that leave its `with` block.

    `names()` returns the client's paths of values by those of a chat, e.g. "input[0]" by
    "messages[1]". It also covers what such a value contains, and is called for errors only.
    """

    __slots__ = ("_names",)

    def __init__(self, names: Callable[[], Mapping[str, str]]) -> None:
        self._names = names

    def __enter__(self) -> None:
        """Begin to rename."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DynamoError) and error.param:
            error.rename_fields(self._rename)

    def _rename(self, field: str) -> str:
        names = self._names()
        outer = field
        while outer and outer not in names:
            outer = outer[: max(outer.rfind("."), outer.rfind("["), 0)]
        return names[outer] + field[len(outer) :] if outer else field


OWN_NAMES = FieldNames(dict)
"""The names of a chat itself."""


class ChatParts(msgspec.Struct, kw_only=True):
    """A chat as the body of any API describes it, in the values of OpenAI's chat. `fields` are
    those that do not depend on the API. `soft_thinking_budget`: engines that cannot keep to the
    budget answer without it. `names` are the client's names of all fields."""

    fields: GenerationBody
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    template_args: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final: bool = False
    soft_thinking_budget: bool = False
    names: FieldNames = OWN_NAMES


_decoder = msgspec.json.Decoder(ChatBody)
_unsupported = UnsupportedFields(ChatBody)


def read_chat(request: Request) -> ChatBody:
    """Return the body of a request. Raises `InvalidRequest`."""
    return decode_body(_decoder, request)


def chat_parts(body: ChatBody) -> ChatParts:
    """Return the chat that the body describes. Raises `InvalidRequest`, `Unsupported`."""
    _unsupported.check(body)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("only with logprobs: true", field="top_logprobs")
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequest(
            "not with add_generation_prompt, which begins a new message",
            hint="send one of them",
            field="continue_final_message",
        )
    max_tokens = body.max_completion_tokens
    return ChatParts(
        fields=body,
        messages=body.messages,
        max_tokens=body.max_tokens if max_tokens is None else max_tokens,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning_effort,
        template_args=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final=body.continue_final_message is True,
    )


def chat_request(chat: ChatParts, model: str, unknown_roles: str) -> ChatRequest:
    """Return the request for the processor. Raises `InvalidRequest`, `Unsupported`."""
    messages = normalise_messages(chat.messages, unknown_roles)
    template_args = chat.template_args or {}
    if template_args:
        check_size("chat_template_kwargs", len(template_args), MAX_TEMPLATE_ARGS)
    if chat.reasoning_effort is not None:
        check_size("reasoning_effort", len(chat.reasoning_effort), MAX_NAME_BYTES, "characters")
        off = THINKING_OFF if chat.reasoning_effort == "none" else {}
        template_args = {"reasoning_effort": chat.reasoning_effort, **off} | template_args
    options = text_options(
        chat.fields, chat.max_tokens, chat.top_logprobs, soft=chat.soft_thinking_budget
    )
    names, call_mode = None, FREE
    if chat.tools or chat.tool_choice:
        names, call_mode = check_tools(chat.tools, chat.tool_choice)
        wanted = options.structured
        if wanted is not None and wanted.kind != "text" and call_mode in ("required", "named"):
            raise InvalidRequest(
                "a call is forced, so that the answer has no structured output beside it",
                hint="set tool_choice to auto, or leave the structured output out",
                field="tool_choice",
            )
    return ChatRequest(
        model=model,
        messages=messages,
        options=options,
        tools=tuple(chat.tools) if chat.tools else (),
        callable_tools=names,
        call_mode=call_mode,
        parallel_tool_calls=chat.parallel_tool_calls is not False,
        template_args=template_args,
        add_generation_prompt=chat.add_generation_prompt and not chat.continue_final,
        continue_final=chat.continue_final,
    )


CHAT_RESPONSE = ResponseTemplate(
    id_prefix="chatcmpl-",
    chunk_object="chat.completion.chunk",
    response_object="chat.completion",
    before_text=b'"delta":{"content":',
    after_text=b"}",
    first_delta=b'"delta":{"role":"assistant","content":""',
    empty_delta=b'"delta":{}',
    make_text_field=lambda text: {"message": {"role": "assistant", "content": text}},
    make_logprobs=chat_logprobs,
    null_fields={"prompt_logprobs": None},
)
"""The template of chat answers."""
