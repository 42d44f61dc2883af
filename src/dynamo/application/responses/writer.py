"""The object `response`, and its writer: as the events of a stream or whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from dynamo.application.items import AnswerItem, ItemKind, ItemWriter, TokenLogprobs, UsageCounter
from dynamo.application.openai.generation_body import TIER_PRIORITIES
from dynamo.application.responses.body import ResponsesBody
from dynamo.application.responses.input_items import Item
from dynamo.core.errors import DynamoError, InvalidRequest, Overloaded
from dynamo.core.values import SamplingParams

encode_json = msgspec.json.encode
_DELTA_EVENTS = {
    "reasoning": b"response.reasoning_text.delta",
    "text": b"response.output_text.delta",
    "call": b"response.function_call_arguments.delta",
}


ID_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Why an answer is incomplete, by the reason of its end."""
_UNSUPPORTED_FIELDS = dict.fromkeys(
    (
        "access_programs",
        "conversation",
        "image",
        "input_transformations",
        "moderation",
        "prompt",
        "prompt_cache_diagnostics",
        "prompt_cache_options",
        "prompt_cache_retention",
        "tool_usage",
    )
)
"""Fields of OpenAI's object that are always null."""

_OPEN_FIELDS = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
"""Fields that are null until the response has ended."""


class ResponseItemWriter(ItemWriter):
    """Writes one response. `response` is its object. `wall` returns Unix time."""

    kept_kinds: ClassVar[frozenset[ItemKind]] = frozenset({"reasoning", "text", "call"})
    holds_end = True

    def __init__(self, response: Item, wall: Callable[[], float]) -> None:
        self.response = response
        self._key = response["id"].removeprefix("resp_")
        self._wall = wall
        self._sequence = 0
        self._delta_parts = (b"", b"")

    def encode_start(self) -> bytes:
        return self._event("response.created", response=self.response) + self._event(
            "response.in_progress", response=self.response
        )

    def begin_item(self, item: AnswerItem) -> bytes:
        fields = _output_item(item, self._key, "in_progress")
        events = self._event("response.output_item.added", output_index=item.index, item=fields)
        place: Item = {"item_id": fields["id"], "output_index": item.index}
        if item.kind != "call":
            place["content_index"] = 0
            events += self._event("response.content_part.added", **place, part=_content_part(item))
        name = _DELTA_EVENTS[item.kind]
        head = b"event: %b\ndata: " % name + encode_json({"type": name.decode(), **place})[:-1]
        self._delta_parts = (head + b',"delta":', b',"sequence_number":')
        return events

    def encode_delta(self, item: AnswerItem, delta: str, logprobs: TokenLogprobs) -> bytes:
        before, after = self._delta_parts
        if item.kind == "text":
            fields = encode_json(_logprob_fields(logprobs)) if logprobs else b"[]"
            after = b',"logprobs":%b' % fields + after
        end = b"%d}\n\n" % self._sequence
        self._sequence += 1
        return before + encode_json(delta) + after + end

    def encode_item_ended(self, item: AnswerItem) -> bytes:
        fields = _output_item(item, self._key, self._status(item))
        place: Item = {"item_id": fields["id"], "output_index": item.index}
        events = b""
        if item.kind != "call":
            place["content_index"] = 0
            part = _content_part(item)
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            kind = "reasoning_text" if item.kind == "reasoning" else "output_text"
            events = self._event(f"response.{kind}.done", **place, **done)
            events += self._event("response.content_part.done", **place, part=part)
        elif item.complete:
            call = {"name": item.name, "arguments": item.text}
            events = self._event("response.function_call_arguments.done", **place, **call)
        return events + self._event(
            "response.output_item.done", output_index=item.index, item=fields
        )

    def complete(self) -> None:
        """Complete `response` with the items of the answer."""
        [choice] = self.choices
        cut = INCOMPLETE_REASONS.get(choice.end.reason)
        self.response |= {
            "output": self._output(),
            "status": "incomplete" if cut else "completed",
            "completed_at": None if cut else int(self._wall()),
            "incomplete_details": {"reason": cut} if cut else None,
            "usage": _usage_fields(self.usage),
        }

    def fail(self, error: DynamoError) -> None:
        """Make `response` a failed one, with the items so far."""
        code = "server_error"
        if isinstance(error, InvalidRequest):
            code = "invalid_prompt"
        elif isinstance(error, Overloaded):
            code = "rate_limit_exceeded"
        failure = {"code": code, "message": f"{error.code}: {error_text(error)}"}
        self.response |= {"status": "failed", "error": failure, "output": self._output()}

    def cancel(self) -> None:
        """Make `response` a cancelled one, with the items so far."""
        self.response |= {"status": "cancelled", "output": self._output()}

    def _output(self) -> list[Item]:
        items = self.choices[0].items if self.choices else ()
        return [_output_item(item, self._key, self._status(item)) for item in items]

    def _status(self, item: AnswerItem) -> str:
        """Return the status of an item. The last text of an answer that was cut is incomplete."""
        [choice] = self.choices
        cut = choice.end.reason in INCOMPLETE_REASONS
        cut = cut and item.kind != "call" and item is choice.items[-1]
        return "incomplete" if cut or item is choice.current or not item.complete else "completed"

    def encode_end(self) -> bytes:
        return self.encode_last_event()

    def encode_last_event(self) -> bytes:
        """Return the last event of a stream: `response` has ended."""
        return self._event(f"response.{self.response['status']}", response=self.response)

    def encode_answer(self) -> bytes:
        return encode_json(self.response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_json(data))


def new_response(
    body: ResponsesBody, response_id: str, model: str, created_at: int, sampling: SamplingParams
) -> Item:
    """Return the object of a response in progress. `sampling`: the values of a request without
    its own."""
    reasoning, text = body.reasoning, body.text
    text_fields: Item = {"format": (text and text.format) or {"type": "text"}}
    if text and text.verbosity:
        text_fields["verbosity"] = text.verbosity
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "status": "in_progress",
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": sampling.presence_penalty
        if body.presence_penalty is None
        else body.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty
        if body.frequency_penalty is None
        else body.frequency_penalty,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": body.service_tier if body.service_tier in TIER_PRIORITIES else "default",
        "store": body.store is not False,
        "temperature": sampling.temperature if body.temperature is None else body.temperature,
        "text": text_fields,
        "tool_choice": body.tool_choice or "auto",
        "tools": [_tool(tool) for tool in body.tools] if body.tools else [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
        **_OPEN_FIELDS,
        **_UNSUPPORTED_FIELDS,
    }


def _tool(tool: Item) -> Item:
    names = ("name", "description", "parameters", "strict")
    return {"type": "function"} | {name: tool.get(name) for name in names}


def error_text(error: DynamoError) -> str:
    """Return message and hint of an error."""
    return f"{error.message} ({error.hint})" if error.hint else error.message


def _usage_fields(usage: UsageCounter) -> Item:
    """Return the object `usage`."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _output_item(item: AnswerItem, response_key: str, status: str) -> Item:
    """Return an item of the output with the text that it has now."""
    head = {"id": f"{ID_PREFIXES[item.kind]}_{response_key}_o{item.index}", "status": status}
    if item.kind == "call":
        call = {"call_id": item.call_id, "name": item.name, "arguments": item.text}
        return head | {"type": "function_call"} | call
    content = [_content_part(item)] if item.deltas else []
    if item.kind == "reasoning":
        return head | {"type": "reasoning", "summary": [], "content": content}
    return head | {"type": "message", "role": "assistant", "content": content}


def _content_part(item: AnswerItem) -> Item:
    """Return the only part of a message or of reasoning."""
    if item.kind == "reasoning":
        return {"type": "reasoning_text", "text": item.text}
    logprobs = _logprob_fields(item.logprobs) if item.logprobs else []
    return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": logprobs}


def _logprob_fields(logprobs: TokenLogprobs) -> list[dict[str, Any]]:
    """Return logprobs as the Responses API writes them."""
    return [
        _logprob(token.token, token.raw, token.logprob)
        | {"top_logprobs": [_logprob(*best) for best in token.top]}
        for token in logprobs
    ]


def _logprob(token: str, raw: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token, "bytes": list(raw), "logprob": logprob}
