"""Recorded tool calls through whole deployments, read by the official `openai` client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.conftest import Deployment
from tests.support.recorded_outputs import RecordedOutput, read_collection

from dynamo.testing.family import write_family_folder

FAMILIES = ("deepseek", "mistral")
COLLECTION = {
    family.slug: (family, outputs)
    for family, outputs in read_collection(Path(__file__).parents[1] / "data" / "toolcalls")
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: Any,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    runtime_environ: dict[str, str],
) -> Iterator[tuple[openai.OpenAI, list[RecordedOutput]]]:
    """A client of a deployment that answers with the recorded outputs of a family."""
    recorded, outputs = COLLECTION[request.param]
    home = tmp_path_factory.mktemp(request.param)
    write_family_folder(recorded.markers, home / "model", tiny_model / "tokenizer.json")
    lines = ({"when": f"[{output.id}]", "text": output.raw_output} for output in outputs)
    (home / "script.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["out=script", str(home / "model"), "--script", str(home / "script.jsonl")]
    deployment = Deployment(
        [*arguments, "--tool-format", request.param, "--tokens-per-step", "1-8"],
        home,
        runtime_environ,
    )
    deployment.wait_ready()
    with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="any", max_retries=0) as client:
        yield client, outputs
    deployment.stop()


def test_the_client_s_helper_puts_streams_together_as_whole_answers(
    family: tuple[openai.OpenAI, list[RecordedOutput]],
) -> None:
    client, outputs = family
    calls = 0
    for output in outputs:
        if output.expected is None:
            continue
        fields: Any = {
            "model": "default",
            "messages": [{"role": "user", "content": f"[{output.id}]"}],
            "tools": output.tools,
            "max_tokens": 4000,
            "extra_body": {
                "chat_template_kwargs": {"generation_prompt": output.generation_prompt or ""}
            },
        }
        whole = client.chat.completions.create(**fields).choices[0]
        with client.chat.completions.stream(**fields) as stream:
            streamed = stream.get_final_completion().choices[0]
        expected = [(call["name"], call["arguments"]) for call in output.expected["tool_calls"]]
        for choice in (whole, streamed):
            functions: Any = [call.function for call in choice.message.tool_calls or []]
            assert [(f.name, json.loads(f.arguments)) for f in functions] == expected
            assert choice.finish_reason == ("tool_calls" if expected else "stop")
            assert (choice.message.content or None) == output.expected["content"]
        calls += len(expected)
    assert calls


def test_responses_have_the_calls_text_and_reasoning_of_chat(
    family: tuple[openai.OpenAI, list[RecordedOutput]],
) -> None:
    client, outputs = family
    for output in outputs:
        prompt = f"[{output.id}]"
        extra: Any = {"chat_template_kwargs": {"generation_prompt": output.generation_prompt or ""}}
        chat = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": prompt}],
            tools=output.tools,  # type: ignore[arg-type]
            max_tokens=4000,
            extra_body=extra,
        ).choices[0]
        fields: Any = {
            "model": "default",
            "input": prompt,
            "tools": [{"type": "function", **tool["function"]} for tool in output.tools],
            "max_output_tokens": 4000,
            "extra_body": extra,
        }
        whole = client.responses.create(**fields)
        *_, last = client.responses.create(**fields, stream=True)
        functions: Any = [call.function for call in chat.message.tool_calls or []]
        for response in (whole, last.response):  # type: ignore[union-attr]
            calls = [item for item in response.output if item.type == "function_call"]
            assert [(call.name, call.arguments) for call in calls] == [
                (function.name, function.arguments) for function in functions
            ]
            assert response.output_text == (chat.message.content or "")
            reasoning = [item.content for item in response.output if item.type == "reasoning"]
            texts = [part.text for parts in reasoning for part in parts or []]
            assert "".join(texts) == (getattr(chat.message, "reasoning_content", None) or "")
            cut = chat.finish_reason == "length"
            assert response.status == ("incomplete" if cut else "completed")


def test_strict_functions_are_served_by_engines_without_grammars(
    family: tuple[openai.OpenAI, list[RecordedOutput]],
) -> None:
    client, outputs = family
    output = next(each for each in outputs if each.expected and each.expected["tool_calls"])
    tools: Any = [tool | {"function": tool["function"] | {"strict": True}} for tool in output.tools]
    prompt = {"generation_prompt": output.generation_prompt or ""}
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": f"[{output.id}]"}],
        tools=tools,
        max_tokens=4000,
        extra_body={"chat_template_kwargs": prompt},
    )
    calls: Any = answer.choices[0].message.tool_calls or []
    expected = output.expected["tool_calls"] if output.expected else []
    assert [call.function.name for call in calls] == [call["name"] for call in expected]


def test_a_wrong_choice_is_an_error_with_a_request_id(
    family: tuple[openai.OpenAI, list[RecordedOutput]],
) -> None:
    client, outputs = family
    wrong: Any = {"type": "function", "function": {"name": "no_such_tool"}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "hi"}],
            tools=outputs[0].tools,  # type: ignore[arg-type]
            tool_choice=wrong,
        )
    assert caught.value.param == "tool_choice"
    assert caught.value.request_id


def test_messages_have_the_same_calls_text_and_reasoning(
    family: tuple[openai.OpenAI, list[RecordedOutput]],
) -> None:
    anthropic: Any = pytest.importorskip("anthropic")
    client, outputs = family
    url = str(client.base_url).removesuffix("/v1/")
    compared = 0
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as messages_client:
        for output in outputs:
            if not output.tools or output.expected is None:
                continue
            message = [{"role": "user", "content": f"[{output.id}]"}]
            template_args = {"generation_prompt": output.generation_prompt or ""}
            fields: Any = {
                "model": "default",
                "messages": message,
                "max_tokens": 4000,
                "extra_body": {"chat_template_kwargs": template_args},
            }
            expected: Any = client.chat.completions.create(**fields, tools=output.tools)
            expected = expected.choices[0].message
            functions = [tool["function"] for tool in output.tools]
            fields["tools"] = [
                {"name": f["name"], "input_schema": f.get("parameters") or {"type": "object"}}
                for f in functions
            ]
            whole = messages_client.messages.create(**fields)
            with messages_client.messages.stream(**fields) as stream:
                streamed = stream.get_final_message()
            calls = [call.function for call in expected.tool_calls or []]
            for answer in (whole, streamed):
                blocks = answer.content
                assert [(b.name, b.input) for b in blocks if b.type == "tool_use"] == [
                    (call.name, json.loads(call.arguments)) for call in calls
                ]
                assert "".join(b.text for b in blocks if b.type == "text") == (
                    expected.content or ""
                )
                assert "".join(b.thinking for b in blocks if b.type == "thinking") == (
                    getattr(expected, "reasoning", None) or ""
                )
                assert answer.stop_reason == ("tool_use" if calls else "end_turn")
            compared += len(calls)
    assert compared
