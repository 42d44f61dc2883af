"""The object `response`, and the output items of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo.application.items import AnswerItem, UsageCounter
from dynamo.application.openai.generation_body import TIER_PRIORITIES
from dynamo.application.responses.body import ResponsesBody
from dynamo.application.responses.input_items import Item
from dynamo.core.errors import DynamoError, InvalidRequest, Overloaded
from dynamo.core.text import DecodedTokenLogprob, TextFinish
from dynamo.core.values import SamplingParams

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
    return {
        "type": "function",
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("parameters"),
        "strict": tool.get("strict"),
    }


def complete_response(response: Item, end: TextFinish, usage: UsageCounter, now: int) -> Item:
    """Return the object of a response that has ended."""
    cut = INCOMPLETE_REASONS.get(end.reason)
    return response | {
        "status": "incomplete" if cut else "completed",
        "completed_at": None if cut else now,
        "incomplete_details": {"reason": cut} if cut else None,
        "usage": usage_fields(usage),
    }


def failed_response(response: Item, error: DynamoError) -> Item:
    """Return the object of a response that failed."""
    code = "server_error"
    if isinstance(error, InvalidRequest):
        code = "invalid_prompt"
    elif isinstance(error, Overloaded):
        code = "rate_limit_exceeded"
    failure = {"code": code, "message": f"{error.code}: {error_text(error)}"}
    return response | {"status": "failed", "error": failure}


def error_text(error: DynamoError) -> str:
    """Return message and hint of an error."""
    return f"{error.message} ({error.hint})" if error.hint else error.message


def usage_fields(usage: UsageCounter) -> Item:
    """Return the object `usage`."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def output_item(item: AnswerItem, response_key: str, status: str) -> Item:
    """Return an item of the output with the text that it has now."""
    head = {"id": f"{ID_PREFIXES[item.kind]}_{response_key}_o{item.index}", "status": status}
    if item.kind == "call":
        call = {"call_id": item.call_id, "name": item.name, "arguments": item.text}
        return head | {"type": "function_call"} | call
    content = [content_part(item)] if item.deltas else []
    if item.kind == "reasoning":
        return head | {"type": "reasoning", "summary": [], "content": content}
    return head | {"type": "message", "role": "assistant", "content": content}


def content_part(item: AnswerItem) -> Item:
    """Return the only part of a message or of reasoning."""
    if item.kind == "reasoning":
        return {"type": "reasoning_text", "text": item.text}
    logprobs = logprob_fields(item.logprobs) if item.logprobs else []
    return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": logprobs}


def logprob_fields(logprobs: Sequence[DecodedTokenLogprob]) -> list[dict[str, Any]]:
    """Return logprobs as the Responses API writes them."""
    return [
        _logprob(token.token, token.raw, token.logprob)
        | {"top_logprobs": [_logprob(*best) for best in token.top]}
        for token in logprobs
    ]


def _logprob(token: str, raw: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token, "bytes": list(raw), "logprob": logprob}
