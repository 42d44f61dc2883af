"""Structured output and forced calls through HTTP: streamed, whole, and over a worker's death."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Deployment, Start

ITEM = {
    "type": "object",
    "properties": {"kind": {"enum": ["red", "green"]}, "sure": {"type": "boolean"}},
    "required": ["kind", "sure"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": ITEM, "minItems": 6, "maxItems": 6}
FORMAT = {"type": "json_schema", "json_schema": {"name": "list", "schema": LIST}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": ITEM}} for name in ("f", "g")
]


def post(deployment: Deployment, **fields: Any) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "go"}], **fields}
    request = urllib.request.Request(
        f"{deployment.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=50)


def refusal(deployment: Deployment, **fields: Any) -> Any:
    with pytest.raises(urllib.error.HTTPError) as caught, post(deployment, **fields):
        pass
    assert caught.value.code == 400
    return json.load(caught.value)["error"]


def events(answer: Any) -> list[Any]:
    lines = [line[6:] for line in answer if line.startswith(b"data: {")]
    return [json.loads(line)["choices"][0] for line in lines]


def test_a_form_holds_streamed_and_whole(mock_deployment: Deployment) -> None:
    with post(mock_deployment, response_format=FORMAT, n=2) as answer:
        choices = json.load(answer)["choices"]
    for choice in choices:
        assert choice["finish_reason"] == "stop"
        assert len(json.loads(choice["message"]["content"])) == 6
    stop = [",", "kind"]  # the structured output is stronger
    with post(mock_deployment, response_format=FORMAT, stream=True, stop=stop) as answer:
        parts = events(answer)
    text = "".join(part["delta"].get("content", "") for part in parts)
    assert [item.keys() for item in json.loads(text)] == [{"kind": "", "sure": ""}.keys()] * 6
    assert parts[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "g"}}, "stop")],
)
def test_calls_are_forced(
    mock_deployment: Deployment, choice: Any, reason: str, stream: bool
) -> None:
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    with post(mock_deployment, stream=stream, **fields) as answer:
        if stream:
            parts = events(answer)
            calls = [call for part in parts for call in part["delta"].get("tool_calls", ())]
            name = calls[0]["function"]["name"]
            arguments = "".join(call["function"]["arguments"] for call in calls)
            end = parts[-1]["finish_reason"]
        else:
            whole = json.load(answer)["choices"][0]
            (call,) = whole["message"]["tool_calls"]
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            end = whole["finish_reason"]
    assert end == reason
    assert name in ("f", "g") if choice == "required" else name == "g"
    assert json.loads(arguments).keys() == ITEM["properties"].keys()  # type: ignore[attr-defined]


def test_what_cannot_be_enforced_is_refused_before_any_work(mock_deployment: Deployment) -> None:
    def schema(document: Any) -> dict[str, Any]:
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": document}}}

    error = refusal(mock_deployment, **schema({"properties": {"a": {"not": {}}}}))
    assert "'not' at /properties/a/not" in error["message"]
    assert error["param"] == "response_format"
    assert error["request_id"]
    huge = refusal(mock_deployment, **schema({"enum": ["x" * 1_000_000]}))
    assert "limit" in huge["message"]
    evil = refusal(mock_deployment, guided_regex="(x{1000}){1000}")
    assert (evil["code"], evil["param"]) == ("schema_too_complex", "guided_regex")
    wrong = refusal(mock_deployment, guided_grammar="start: (")
    assert "line 1, column" in wrong["message"]
    both = refusal(mock_deployment, response_format=FORMAT, guided_choice=["a"])
    assert "one structured output" in both["message"]
    with_null = {"structured_outputs": {"regex": "(", "json": None}}
    assert refusal(mock_deployment, **with_null)["param"] == "structured_outputs"
    broken = [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]
    tool = refusal(mock_deployment, tools=broken, tool_choice="required")
    assert tool["param"] == "tools[0].function.parameters"


def test_a_worker_killed_in_the_middle_changes_nothing(start: Start, tiny_model: Path) -> None:
    arguments = ["out=mock", str(tiny_model), "--model-name", "tiny", "--workers", "2"]
    deployment = start(*arguments, "--timing", "constant:0,40")
    with post(deployment, response_format=FORMAT, temperature=0) as answer:
        expected = json.load(answer)["choices"][0]["message"]["content"]
    with post(deployment, response_format=FORMAT, temperature=0, stream=True) as answer:
        worker, parts = answer.headers["x-dynamo-worker"], list[Any]()
        for line in answer:
            if line.startswith(b"data: {"):
                parts.append(json.loads(line[6:])["choices"][0])
                if len(parts) == 8:
                    (victim,) = [p for p in deployment.processes() if p["instance"] == worker]
                    os.kill(victim["pid"], signal.SIGKILL)
    assert len(parts) > 16
    assert "".join(part["delta"].get("content", "") for part in parts) == expected
    assert len(json.loads(expected)) == 6
    assert parts[-1]["finish_reason"] == "stop"
