"""The route /v1/chat/completions: complete and streamed answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "one two three"}]


async def ask(connect: Any, site: Any, path: str = CHAT, **body: Any) -> Any:
    async with connect(site.port) as connection:
        connection.ask("POST", path, {"model": "words", "messages": HI} | body)
        return await connection.answer()


async def test_a_complete_answer(site: Any, connect: Any) -> None:
    answer = await ask(connect, site)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-dynamo-worker"] == "w1"
    body = answer.json
    assert body["id"] == f"chatcmpl-{answer.headers['x-request-id']}"
    assert body["object"] == "chat.completion"
    assert body["model"] == "words"
    assert body["created"] > 1_700_000_000
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "one two three "},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


async def test_a_streamed_answer(site: Any, connect: Any) -> None:
    answer = await ask(connect, site, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert b'"content":"one "' in answer.body
    first, *texts, last, done = answer.events
    assert done == "[DONE]"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["delta"]["content"] for event in texts] == [
        "one ",
        "two ",
        "three ",
    ]
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["choices"][0]["delta"] == {}
    assert {event["object"] for event in (first, *texts, last)} == {"chat.completion.chunk"}
    assert len({event["id"] for event in (first, *texts, last)}) == 1
    assert "usage" not in first


async def test_tokens_of_different_loop_turns_are_sent_separately(site: Any, connect: Any) -> None:
    answer = await ask(connect, site, stream=True, max_tokens=20)
    assert len(answer.chunks) == 21


async def test_stream_with_usage(site: Any, connect: Any) -> None:
    answer = await ask(connect, site, stream=True, stream_options={"include_usage": True})
    *others, usage, _ = answer.events
    assert all(event["usage"] is None for event in others)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_choices(site: Any, connect: Any) -> None:
    whole = (await ask(connect, site, n=3)).json
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["prompt_tokens"] == 3
    assert whole["usage"]["completion_tokens"] == 9
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    events = (await ask(connect, site, n=3, stream=True)).events
    for choice in range(3):
        deltas = [
            event["choices"][0]["delta"].get("content", "")
            for event in events[:-1]
            if event["choices"][0]["index"] == choice
        ]
        assert "".join(deltas) == "one two three "


async def test_every_character_survives(site: Any, connect: Any) -> None:
    text = 'a"b\\c \n\t\x01\x7f é 漢字 🦊 \u2028 </script>'
    message = [{"role": "user", "content": text}]
    whole = (await ask(connect, site, messages=message)).json
    events = (await ask(connect, site, messages=message, stream=True)).events
    streamed = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    assert streamed == whole["choices"][0]["message"]["content"]
    assert streamed.split() == text.split()


async def test_logprobs(site: Any, connect: Any) -> None:
    entry = {
        "token": "one ",
        "logprob": -0.5,
        "bytes": list(b"one "),
        "top_logprobs": [
            {"token": "one 0", "logprob": 0.0, "bytes": list(b"one ")},
            {"token": "one 1", "logprob": -1.0, "bytes": list(b"one ")},
        ],
    }
    whole = (await ask(connect, site, logprobs=True, top_logprobs=2)).json
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    assert content[0] == entry
    events = (await ask(connect, site, logprobs=True, top_logprobs=2, stream=True)).events
    assert events[1]["choices"][0]["logprobs"]["content"] == [entry]
    plain = (await ask(connect, site, logprobs=True)).json
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_options_reach_the_processor(open_site: Any, connect: Any) -> None:
    site = await open_site(priority_range=(0, 9))
    await ask(
        connect,
        site,
        max_tokens=7,
        max_completion_tokens=2,
        temperature=0.5,
        top_p=0.25,
        top_k=-1,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        seed=-5,
        logit_bias={"17": -100},
        stop=["x", "y"],
        stop_token_ids=[3],
        min_tokens=1,
        ignore_eos=True,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        cache_salt="tenant",
        priority=2,
        chat_template_kwargs={"thinking": False},
        reasoning_effort="low",
        user="somebody",
        store=True,
        metadata={"a": "b"},
        unknown_field={"deep": [1]},
    )
    request = site.processor.requests[-1]
    options, sampling = request.options, request.options.sampling
    assert (options.max_tokens, options.min_tokens, options.n) == (2, 1, 1)
    assert (options.stop, options.stop_token_ids) == (("x", "y"), (3,))
    assert (options.ignore_eos, options.include_stop, options.skip_special_tokens) == (
        True,
        True,
        False,
    )
    assert (options.salt, options.priority, options.top_logprobs) == ("tenant", 2, None)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 0)
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 1, -1)
    assert (sampling.repetition_penalty, sampling.seed) == (1.1, -5)
    assert sampling.logit_bias == {17: -100}
    assert request.template_args == {"thinking": False, "reasoning_effort": "low"}
    assert 0 < site.processor.contexts[-1].timeout_s <= 300


async def test_keys_of_logit_bias_that_are_no_token_ids_are_named(site: Any, connect: Any) -> None:
    for biases in ({"one": 1, "7": 2, "-3": 1}, {"1" * 10: 1}):
        answer = await ask(connect, site, logit_bias=biases)
        assert answer.status == 400
        assert answer.json["error"]["param"] == "logit_bias"
        named = [key for key in biases if repr(key) in answer.json["error"]["message"]]
        assert named == [key for key in biases if key != "7"]


async def test_the_last_message_is_continued(site: Any, connect: Any) -> None:
    await ask(connect, site, continue_final_message=True, add_generation_prompt=False)
    await ask(connect, site, continue_final_message=False)
    continued, answered = site.processor.requests[-2:]
    assert (continued.continue_final, continued.add_generation_prompt) == (True, False)
    assert (answered.continue_final, answered.add_generation_prompt) == (False, True)


async def test_messages_reach_the_processor_in_one_form(site: Any, connect: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    await ask(
        connect,
        site,
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "developer", "content": [{"type": "text", "text": "be kind"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "42", "tool_call_id": "1"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, "b"], "name": "bob"},
        ],
    )
    messages = site.processor.requests[-1].messages
    kind, a, b = ({"type": "text", "text": text} for text in ("be kind", "a", "b"))
    contents = [message["content"] for message in messages]
    assert contents == ["be brief", [kind], None, "42", [a, b]]
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert messages[4]["name"] == "bob"


async def test_fields_without_a_value_are_removed(site: Any, connect: Any) -> None:
    message = {"role": "assistant", "content": "hm"}
    empty = message | {"refusal": None, "audio": None, "reasoning": None}
    messages = [empty | {"tool_calls": None}, message | {"tool_calls": []}, *HI]
    messages.append(HI[0] | {"name": None})
    assert (await ask(connect, site, messages=messages)).status == 200
    assert site.processor.requests[-1].messages == (message, message, *HI, *HI)


async def test_arguments_that_are_no_json_pass_as_text(site: Any, connect: Any) -> None:
    calls = [
        {"id": str(number), "type": "function", "function": {"name": "f", "arguments": arguments}}
        for number, arguments in enumerate(("{a: 1}", "", None, {"a": "é"}, "[1]"))
    ]
    messages = [{"role": "assistant", "tool_calls": calls}]
    assert (await ask(connect, site, messages=messages)).status == 200
    [message] = site.processor.requests[-1].messages
    arguments = [call["function"]["arguments"] for call in message["tool_calls"]]
    assert arguments == ["{a: 1}", "{}", "{}", '{"a": "é"}', "[1]"]


async def test_tools_reach_the_template_with_tool_choice_none(site: Any, connect: Any) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert (await ask(connect, site, tools=[tool], tool_choice="none")).status == 200
    assert site.processor.requests[-1].tools == (tool,)


async def test_unknown_roles_may_be_dropped(open_site: Any, connect: Any) -> None:
    site = await open_site(unknown_roles="warn")
    messages = [{"role": "narrator", "content": "meanwhile"}, *HI]
    assert (await ask(connect, site, messages=messages)).status == 200
    assert len(site.processor.requests[-1].messages) == 1
    assert (await ask(connect, site, messages=messages[:1])).status == 400


async def test_aliases_and_the_default(site: Any, connect: Any) -> None:
    assert (await ask(connect, site, model="spoken")).json["model"] == "spoken"
    assert (await ask(connect, site, model="default")).json["model"] == "words"


@pytest.mark.parametrize("model", [None, "", "absent"])
async def test_requests_without_a_model_get_the_default(
    site: Any, connect: Any, model: str | None
) -> None:
    bodies = {
        "/v1/chat/completions": {"messages": HI},
        "/v1/completions": {"prompt": "one"},
        "/v1/responses": {"input": "one"},
        "/tokenize": {"prompt": "one"},
        "/detokenize": {"tokens": [1]},
        "/v1/messages": {"messages": HI, "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": HI},
    }
    fields = {} if model == "absent" else {"model": model}
    async with connect(site.port) as connection:
        for path, body in bodies.items():
            connection.ask("POST", path, body | fields)
            answer = await connection.answer()
            if "messages" in path:  # Anthropic's API requires one
                assert (answer.status, answer.json["error"]["message"][:7]) == (400, "model: ")
            else:
                assert answer.status == 200, answer.body
                assert answer.json.get("model", "words") == "words"
    await site.application.close(0)


async def test_an_error_before_the_first_text_has_its_status(site: Any, connect: Any) -> None:
    site.processor.fails = "before"
    for stream in (False, True):
        answer = await ask(connect, site, stream=stream)
        assert answer.status == 503
        assert answer.error["code"] == "no_workers"
        assert answer.error["type"] == "service_unavailable"
        assert answer.headers["retry-after"] == "1"


async def test_an_error_in_the_middle_ends_the_stream(site: Any, connect: Any) -> None:
    site.processor.fails = "after"
    async with connect(site.port) as connection:
        connection.ask("POST", CHAT, {"model": "words", "messages": HI, "stream": True})
        answer = await connection.answer()
        assert answer.status == 200
        *_, error, done = answer.events
        assert error["error"]["code"] == "worker_failed"
        assert "send it again" in error["error"]["hint"]
        assert error["error"]["request_id"] == answer.headers["x-request-id"]
        assert done == "[DONE]"
        site.processor.fails = ""
        connection.ask("POST", CHAT, {"model": "words", "messages": HI})
        assert (await connection.answer()).status == 200


async def test_an_error_in_the_middle_of_a_complete_answer(site: Any, connect: Any) -> None:
    site.processor.fails = "after"
    answer = await ask(connect, site)
    assert (answer.status, answer.error["code"]) == (503, "worker_failed")
    assert "send it again" in answer.error["hint"]


async def test_a_bug_is_500_without_a_traceback(
    site: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*args: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(site.processor, "chat", broken)
    answer = await ask(connect, site)
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert "secret" not in answer.body.decode()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_before_the_first_text_cancels_the_request(
    site: Any, connect: Any, stream: bool
) -> None:
    site.processor.gate.clear()
    async with connect(site.port) as connection:
        connection.ask("POST", CHAT, {"model": "words", "messages": HI, "stream": stream})
        await site.processor.entered.wait()
    await site.processor.cancelled.wait()
    assert site.application.generation.concurrency.running == 0


async def test_a_disconnect_cancels_a_stream(site: Any, connect: Any) -> None:
    async with connect(site.port) as connection:
        body = {"model": "words", "messages": HI, "stream": True, "max_tokens": 10_000_000}
        connection.ask("POST", CHAT, body)
        await connection.head()
        await connection.reader.read(10)
    while site.application.generation.concurrency.running:
        await asyncio.sleep(0.01)


async def test_a_server_that_stops_during_a_stream_ends_it_with_an_error(
    site: Any, connect: Any
) -> None:
    async with connect(site.port) as connection:
        body = {"model": "words", "messages": HI, "stream": True, "max_tokens": 10_000_000}
        connection.ask("POST", CHAT, body)
        await connection.head()
        await connection.reader.read(10)
        await site.http.stop(0)
        end = (await connection.reader.read())[-600:]
    assert b'"code":"server_stopped"' in end
    assert b"data: [DONE]" in end.partition(b"server_stopped")[2]


async def test_a_server_that_stops_before_an_answer_sends_an_error(site: Any, connect: Any) -> None:
    site.processor.gate.clear()
    async with connect(site.port) as connection:
        connection.ask("POST", CHAT, {"model": "words", "messages": HI})
        await site.processor.entered.wait()
        await site.http.stop(0)
        answer = await connection.answer()
    assert (answer.status, answer.error["code"]) == (503, "server_stopped")


async def test_pipelined_answers_keep_their_order(site: Any, connect: Any) -> None:
    async with connect(site.port) as connection:
        for number in range(1, 21):
            body = {"model": "words", "messages": HI, "max_tokens": number, "stream": number % 2}
            connection.ask("POST", CHAT, body | {"stream": bool(number % 2)})
        for number in range(1, 21):
            answer = await connection.answer()
            if number % 2:
                assert len(answer.events) == number + 3
            else:
                assert answer.json["usage"]["completion_tokens"] == number


async def test_a_stream_split_anywhere_is_the_same_text(site: Any, connect: Any) -> None:
    async with connect(site.port, receive_buffer=4096) as connection:
        connection.ask(
            "POST", CHAT, {"model": "words", "messages": HI, "stream": True, "max_tokens": 300}
        )
        answer = await connection.answer()
    texts = [event["choices"][0]["delta"].get("content", "") for event in answer.events[:-1]]
    assert "".join(texts) == "one two three " * 100
