"""Invalid requests: each gets a status, a code and the name of the invalid field."""

from __future__ import annotations

import json
from typing import Any

import pytest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}

CALL = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}


def choose(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allow(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "words", "messages": HI} | fields


def with_messages(*messages: Any) -> dict[str, Any]:
    return {"model": "words", "messages": list(messages)}


# route, body, and the field that the answer names
WRONG_FIELDS: list[tuple[str, dict[str, Any], str | None]] = [
    (CHAT, {"model": "words"}, "messages"),
    (CHAT, chat(model=5), "model"),
    (CHAT, chat(messages="hi"), "messages"),
    (CHAT, chat(messages={}), "messages"),
    (CHAT, chat(messages=[]), "messages"),
    (CHAT, with_messages("hi"), "messages[0]"),
    (CHAT, with_messages({"content": "hi"}), "messages[0].role"),
    (CHAT, with_messages({"role": 1, "content": "hi"}), "messages[0].role"),
    (CHAT, with_messages(HI[0], {"role": "robot", "content": "hi"}), "messages[1].role"),
    (CHAT, with_messages({"role": "user"}), "messages[0].content"),
    (CHAT, with_messages({"role": "user", "content": None}), "messages[0].content"),
    (CHAT, with_messages({"role": "user", "content": 5}), "messages[0].content"),
    (CHAT, with_messages({"role": "user", "content": {"text": "hi"}}), "messages[0].content"),
    (CHAT, with_messages({"role": "user", "content": [5]}), "messages[0].content[0]"),
    (CHAT, with_messages({"role": "user", "content": [{}]}), "messages[0].content[0].type"),
    (
        CHAT,
        with_messages({"role": "user", "content": [{"type": "text"}]}),
        "messages[0].content[0].text",
    ),
    (
        CHAT,
        with_messages(
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
        ),
        "messages[0].content[0].type",
    ),
    (CHAT, with_messages({"role": "assistant", "tool_calls": 5}), "messages[0].tool_calls"),
    (
        CHAT,
        with_messages({"role": "assistant", "tool_calls": [{}]}),
        "messages[0].tool_calls[0].function",
    ),
    (CHAT, chat(stream="yes"), "stream"),
    (CHAT, chat(stream=1), "stream"),
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options"),
    (CHAT, chat(stream=True, stream_options=5), "stream_options"),
    (CHAT, chat(n=0), "n"),
    (CHAT, chat(n=-1), "n"),
    (CHAT, chat(n=129), "n"),
    (CHAT, chat(n=1.5), "n"),
    (CHAT, chat(n=True), "n"),
    (CHAT, chat(n=10**30), "n"),
    (CHAT, chat(max_tokens=-1), "max_tokens"),
    (CHAT, chat(max_tokens=0), "max_tokens"),
    (CHAT, chat(max_tokens="5"), "max_tokens"),
    (CHAT, chat(max_completion_tokens=-5), "max_completion_tokens"),
    (CHAT, chat(max_completion_tokens=10**30), "max_completion_tokens"),
    (CHAT, chat(min_tokens=-1), "min_tokens"),
    (CHAT, chat(temperature=-0.1), "temperature"),
    (CHAT, chat(temperature=2.1), "temperature"),
    (CHAT, chat(temperature="hot"), "temperature"),
    (CHAT, chat(top_p=0), "top_p"),
    (CHAT, chat(top_p=1.01), "top_p"),
    (CHAT, chat(top_k=-2), "top_k"),
    (CHAT, chat(min_p=2), "min_p"),
    (CHAT, chat(presence_penalty=2.5), "presence_penalty"),
    (CHAT, chat(frequency_penalty=-2.5), "frequency_penalty"),
    (CHAT, chat(repetition_penalty=0), "repetition_penalty"),
    (CHAT, chat(seed="x"), "seed"),
    (CHAT, chat(seed=2**63), "seed"),
    (CHAT, chat(stop=""), "stop"),
    (CHAT, chat(stop=["a", ""]), "stop"),
    (CHAT, chat(stop=5), "stop"),
    (CHAT, chat(stop=["a", 5]), "stop[1]"),
    (CHAT, chat(stop=["a"] * 65), "stop"),
    (CHAT, chat(stop_token_ids=[-1]), "stop_token_ids[0]"),
    (CHAT, chat(logit_bias={"5": 101}), "logit_bias"),
    (CHAT, chat(logit_bias={"word": 1}), "logit_bias"),
    (CHAT, chat(logit_bias=[1]), "logit_bias"),
    (CHAT, chat(logprobs=5), "logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=-1), "top_logprobs"),
    (CHAT, chat(top_logprobs=2), "top_logprobs"),
    (CHAT, chat(ignore_eos="no"), "ignore_eos"),
    (CHAT, chat(chat_template_kwargs=[]), "chat_template_kwargs"),
    (CHAT, chat(tools={}), "tools"),
    (CHAT, chat(tools=[TOOL], tool_choice="always"), "tool_choice"),
    (CHAT, chat(tools=[TOOL], tool_choice={"type": "tool"}), "tool_choice"),
    (CHAT, chat(tools=[TOOL], tool_choice={"type": "function"}), "tool_choice"),
    (CHAT, chat(tools=[TOOL], tool_choice=choose("g")), "tool_choice"),
    (CHAT, chat(tools=[TOOL], tool_choice=allow("auto", "f", "g")), "tool_choice"),
    (CHAT, chat(tools=[5]), "tools[0]"),
    (CHAT, chat(tools=[{"type": "web_search"}]), "tools[0].type"),
    (CHAT, chat(tools=[{"type": "function"}]), "tools[0].function"),
    (CHAT, chat(tools=[TOOL, TOOL]), "tools[1].function.name"),
    (CHAT, chat(tools=[choose("a b")]), "tools[0].function.name"),
    (CHAT, chat(tools=[choose("x" * 129)]), "tools[0].function.name"),
    (CHAT, chat(tools=[choose(f"f{n}") for n in range(129)]), "tools"),
    (
        CHAT,
        chat(tools=[{"function": {"name": "f", "parameters": [1]}}]),
        "tools[0].function.parameters",
    ),
    (CHAT, with_messages({"role": "tool", "content": "4"}), "messages[0].tool_call_id"),
    (
        CHAT,
        with_messages(CALL, {"role": "tool", "content": "4", "tool_call_id": "other"}),
        "messages[1].tool_call_id",
    ),
    (CHAT, chat(tool_choice="required"), "tool_choice"),
    (CHAT, chat(tools=[TOOL], tool_choice=allow("required")), "tool_choice"),
    (CHAT, chat(tools=[TOOL], tool_choice=allow("some", "f")), "tool_choice"),
    (
        CHAT,
        chat(tools=[TOOL], tool_choice="required", response_format={"type": "json_object"}),
        "tool_choice",
    ),
    (CHAT, chat(functions=[{"name": "f"}]), "functions"),
    (CHAT, chat(function_call="auto"), "function_call"),
    (CHAT, chat(modalities=["audio"]), "modalities"),
    (CHAT, chat(audio={"voice": "x"}), "audio"),
    (CHAT, chat(web_search_options={}), "web_search_options"),
    (CHAT, chat(best_of=2), "best_of"),
    (CHAT, chat(use_beam_search=True), "use_beam_search"),
    (CHAT, chat(return_token_ids=True), "return_token_ids"),
    (CHAT, chat(return_tokens_as_token_ids=True), "return_tokens_as_token_ids"),
    (
        CHAT,
        chat(continue_final_message=True, add_generation_prompt=True),
        "continue_final_message",
    ),
    (CHAT, chat(chat_template="{{ 1 }}"), "chat_template"),
    (CHAT, chat(documents=[{"text": "x"}]), "documents"),
    (TEXT, {"model": "words"}, "prompt"),
    (TEXT, {"model": "words", "prompt": 5}, "prompt"),
    (TEXT, {"model": "words", "prompt": []}, "prompt"),
    (TEXT, {"model": "words", "prompt": [[]]}, "prompt"),
    (TEXT, {"model": "words", "prompt": ["a", 5]}, "prompt"),
    (TEXT, {"model": "words", "prompt": [1.5]}, "prompt[0]"),
    (TEXT, {"model": "words", "prompt": [-1]}, "prompt[0]"),
    (TEXT, {"model": "words", "prompt": [2**32]}, "prompt[0]"),
    (TEXT, {"model": "words", "prompt": ["a"] * 2049}, "prompt"),
    (TEXT, {"model": "words", "prompt": "a", "max_tokens": -1}, "max_tokens"),
    (TEXT, {"model": "words", "prompt": "a", "logprobs": 21}, "logprobs"),
    (TEXT, {"model": "words", "prompt": "a", "logprobs": True}, "logprobs"),
    (TEXT, {"model": "words", "prompt": "a", "suffix": "b"}, "suffix"),
    (TEXT, {"model": "words", "prompt": "a", "best_of": 2}, "best_of"),
    (TEXT, {"model": "words", "prompt": "a", "echo": "yes"}, "echo"),
    (TEXT, {"model": "words", "prompt": "a", "echo": True, "logprobs": 0, "stream": True}, "echo"),
    (TEXT, {"model": "words", "prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
]


async def test_wrong_fields_are_named(site: Any, connect: Any) -> None:
    async with connect(site.port) as connection:
        for path, body, param in WRONG_FIELDS:
            connection.ask("POST", path, body)
            answer = await connection.answer()
            assert answer.status == 400, body
            assert answer.error["param"] == param, (body, answer.error)
            assert answer.error["code"] in ("invalid_request", "unsupported"), body
            assert answer.error["type"] == "invalid_request_error"
            assert answer.error["request_id"] == answer.headers["x-request-id"]
            assert param.split("[")[0].split(".")[0] in answer.error["message"], answer.error
    assert not site.processor.requests


NESTED = b'{"model":"words","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
HIDDEN = b'{"model":"words","messages":[{"role":"user","content":"hi"}],"other":"\xff"}'

WRONG_BODIES: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("space", b"   "),
    ("not JSON", b"hello"),
    ("cut short", b'{"model": "words", "mess'),
    ("trailing comma", b'{"model": "words",}'),
    ("two values", b'{"model": "words", "messages": []} {}'),
    ("an array", b"[]"),
    ("null", b"null"),
    ("a string", b'"hi"'),
    ("a number", b"5"),
    ("single quotes", b"{'model': 'words'}"),
    ("NaN", b'{"model": "words", "messages": [], "temperature": NaN}'),
    ("infinity", b'{"model": "words", "messages": [], "temperature": 1e999}'),
    ("a control character", b'{"model": "wo\x01rds"}'),
    ("invalid UTF-8", b'{"model": "words\xff"}'),
    ("invalid UTF-8 in a field that is ignored", HIDDEN),
    ("UTF-16", '{"model": "words"}'.encode("utf-16")),
    ("a byte order mark", b'\xef\xbb\xbf{"model": "words"}'),
    ("a lone surrogate", b'{"model": "\\ud800 x", "messages": []}'),
    ("nested deeply", NESTED),
    ("a form", b"model=words&messages=hi"),
]


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
async def test_wrong_bodies(site: Any, connect: Any, path: str) -> None:
    async with connect(site.port) as connection:
        for name, body in WRONG_BODIES:
            connection.ask("POST", path, body)
            answer = await connection.answer()
            assert answer.status == 400, name
            assert answer.error["code"] == "invalid_request", name
        connection.ask("GET", "/live")
        assert (await connection.answer()).status == 200


async def test_a_compressed_body_is_refused(site: Any, connect: Any) -> None:
    async with connect(site.port) as connection:
        connection.ask("POST", CHAT, chat(), {"content-encoding": "gzip"})
        answer = await connection.answer()
    assert answer.status == 415
    assert "gzip" in answer.error["message"]


POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n"
GOOD = json.dumps(chat()).encode()
LENGTH = b"content-length: %d\r\n" % len(GOOD)
CHUNKED = b"transfer-encoding: chunked\r\n"

# requests that two servers on a path might interpret differently (request smuggling)
WRONG_HTTP: list[tuple[str, int, bytes]] = [
    ("both framings", 400, POST + LENGTH + CHUNKED + b"\r\n0\r\n\r\n"),
    ("both framings, turned", 400, POST + CHUNKED + LENGTH + b"\r\n0\r\n\r\n"),
    ("two lengths", 400, POST + LENGTH + b"content-length: 5\r\n\r\n" + GOOD),
    ("two equal lengths", 400, POST + LENGTH + LENGTH + b"\r\n" + GOOD),
    ("a list of lengths", 400, POST + b"content-length: 5, 5\r\n\r\nhello"),
    ("a negative length", 400, POST + b"content-length: -1\r\n\r\n"),
    ("a signed length", 400, POST + b"content-length: +5\r\n\r\nhello"),
    ("a hexadecimal length", 400, POST + b"content-length: 0x5\r\n\r\nhello"),
    ("an endless length", 400, POST + b"content-length: " + b"9" * 40 + b"\r\n\r\n"),
    ("an empty length", 400, POST + b"content-length: \r\n\r\n"),
    ("an unknown coding", 400, POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n"),
    ("two codings", 400, POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
    ("chunked twice", 400, POST + CHUNKED + CHUNKED + b"\r\n0\r\n\r\n"),
    ("chunked in HTTP/1.0", 400, b"POST / HTTP/1.0\r\n" + CHUNKED + b"\r\n0\r\n\r\n"),
    ("a bad chunk size", 400, POST + CHUNKED + b"\r\nzz\r\nhello\r\n0\r\n\r\n"),
    ("a huge chunk size", 400, POST + CHUNKED + b"\r\n" + b"f" * 20 + b"\r\n"),
    ("a chunk that is too long", 400, POST + CHUNKED + b"\r\n3\r\nhello\r\n0\r\n\r\n"),
    ("a space before the colon", 400, POST + b"content-length : 5\r\n\r\nhello"),
    ("a folded header", 400, POST + b"x: a\r\n b\r\n\r\n"),
    ("a bare line feed", 400, b"GET /live HTTP/1.1\nhost: a\n\n"),
    ("a NUL in a header", 400, POST + b"x: a\0b\r\n\r\n"),
    ("a header without name", 400, POST + b": a\r\n\r\n"),
    ("a header with a space", 400, POST + b"x y: a\r\n\r\n"),
    ("no host", 400, b"GET /live HTTP/1.1\r\n\r\n"),
    ("two hosts", 400, b"GET /live HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n"),
    ("two keys", 400, POST + b"authorization: Bearer a\r\nauthorization: Bearer b\r\n\r\n"),
    ("HTTP/2", 400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    ("HTTP/2.0", 400, b"GET /live HTTP/2.0\r\nhost: a\r\n\r\n"),
    ("HTTP/0.9", 400, b"GET /live\r\n\r\n"),
    ("HTTP/9.9", 400, b"GET /live HTTP/9.9\r\nhost: a\r\n\r\n"),
    ("an unknown method", 400, b"HACK /live HTTP/1.1\r\nhost: a\r\n\r\n"),
    ("TLS", 400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    ("a space in the path", 400, b"GET /li ve HTTP/1.1\r\nhost: a\r\n\r\n"),
    ("bytes in the path", 400, b"GET /\xff\xfe HTTP/1.1\r\nhost: a\r\n\r\n"),
    ("an unknown expectation", 400, POST + b"expect: cake\r\n" + LENGTH + b"\r\n" + GOOD),
    ("a header that is too long", 431, POST + b"x: " + b"y" * 40_000 + b"\r\n\r\n"),
    ("too many headers", 431, POST + b"x: y\r\n" * 101 + b"\r\n"),
    ("a path that is too long", 431, b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n"),
    ("a body that is too large", 413, POST + b"content-length: 99999999\r\n\r\n"),
]


@pytest.mark.parametrize(("name", "status", "data"), WRONG_HTTP, ids=[w[0] for w in WRONG_HTTP])
async def test_wrong_http(site: Any, connect: Any, name: str, status: int, data: bytes) -> None:
    """The answer is a JSON error, then the connection closes without answering what follows."""
    smuggled = b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n"
    async with connect(site.port) as connection:
        connection.send(data, smuggled)
        answer = await connection.answer()
        assert answer.status == status
        assert answer.error["type"] == "invalid_request_error"
        assert answer.headers["connection"] == "close"
        assert await connection.closed()
    assert not site.processor.requests


async def test_unusual_but_valid_requests(site: Any, connect: Any) -> None:
    async with connect(site.port) as connection:
        connection.send(b"\r\n\r\nGET http://elsewhere/live?x=1 HTTP/1.1\r\nHOST: a\r\n\r\n")
        assert (await connection.answer()).status == 200
        connection.ask("GET", "/%6Cive#part")
        assert (await connection.answer()).status == 200
        connection.ask("POST", CHAT, GOOD, {"content-type": "text/plain"})
        assert (await connection.answer()).status == 200
        nulls = dict.fromkeys(("n", "stop", "tools", "seed", "audio", "logprobs", "stream"))
        connection.ask("POST", CHAT, chat(**nulls))
        assert (await connection.answer()).status == 200
        neutral = {
            "best_of": 1,
            "logprobs": False,
            "top_logprobs": 0,
            "return_token_ids": False,
            "response_format": {"type": "text"},
            "modalities": ["text"],
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "logit_bias": {},
            "service_tier": "auto",
            "prediction": None,
        }
        connection.ask("POST", CHAT, chat(**neutral))
        assert (await connection.answer()).status == 200
        connection.ask("PROPFIND", "/live")
        assert (await connection.answer()).status == 405
