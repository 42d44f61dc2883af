"""All other routes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import dynamo
from dynamo.application import Application, Gateway
from dynamo.application.foreign_paths import FOREIGN_PATHS
from dynamo.application.openai.logprobs import completion_logprobs
from dynamo.core.clock import SystemClock
from dynamo.core.errors import NotFound, PlaneUnavailable
from dynamo.core.settings.schema import ServerSettings
from dynamo.core.text import DecodedTokenLogprob
from dynamo.telemetry.metrics import Registry


async def get(connect: Any, site: Any, path: str, method: str = "GET", body: Any = None) -> Any:
    async with connect(site.port) as connection:
        connection.ask(method, path, body)
        return await connection.answer(bodiless=method == "HEAD")


async def test_models(site: Any, connect: Any) -> None:
    body = (await get(connect, site, "/v1/models")).json
    assert body["object"] == "list"
    assert [model["id"] for model in body["data"]] == ["words", "spoken"]
    assert body["data"][0] == {
        "id": "words",
        "created": 1_700_000_000,
        "owned_by": "dynamo",
        "root": "words",
        "max_model_len": 100_000,
        "object": "model",
    }
    assert (await get(connect, site, "/v1/models/spoken")).json["root"] == "words"
    missing = await get(connect, site, "/v1/models/none")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")
    site.add("org/name with space")
    assert (await get(connect, site, "/v1/models/org/name%20with%20space")).status == 200


async def test_before_any_model(open_site: Any, connect: Any) -> None:
    site = await open_site(empty=True)
    site.gateway.set_pending("words", "its worker reads the weights")
    assert (await get(connect, site, "/live")).status == 200
    health = await get(connect, site, "/health")
    assert health.status == 503
    assert "reads the weights" in health.json["reasons"]["models"]
    chat = {"model": "words", "messages": [{"role": "user", "content": "x"}]}
    text = {"model": "words", "prompt": "x"}
    for method, path, body in (
        ("GET", "/v1/models", {}),
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/v1/completions", text),
        ("POST", "/tokenize", text),
    ):
        answer = await get(connect, site, path, method, body)
        assert (answer.status, answer.error["code"]) == (503, "model_not_ready")
        assert int(answer.headers["retry-after"]) >= 1
    site.add("words")
    assert (await get(connect, site, "/health")).status == 200


class FakeMetricsSource:
    """The metrics of a deployment whose discovery may be away."""

    def __init__(self) -> None:
        self.targets: list[Any] = []
        self.reachable = True

    async def render(self) -> str:
        return ""

    async def list_targets(self) -> list[Any]:
        if not self.reachable:
            raise PlaneUnavailable("discovery is away")
        return self.targets


async def test_scrape_targets(open_site: Any, connect: Any) -> None:
    source = FakeMetricsSource()
    site = await open_site(
        metrics_source=source, api_keys=("secret",), allowed_hosts=("a.example",)
    )
    answer = await get(connect, site, "/metrics/targets")
    assert (answer.status, answer.json) == (200, [])
    source.targets.append({"targets": ["10.0.0.2:9101"], "labels": {"role": "worker"}})
    answer = await get(connect, site, "/metrics/targets")
    assert (answer.headers["content-type"], answer.json) == ("application/json", source.targets)
    async with connect(site.port) as connection:
        connection.ask("GET", "/metrics/targets", None, {"host": "evil.example"})
        assert (await connection.answer()).status == 403
    source.reachable = False
    assert (await get(connect, site, "/metrics/targets")).status == 503


async def test_without_other_processes_there_are_no_scrape_targets(site: Any, connect: Any) -> None:
    assert (await get(connect, site, "/metrics/targets")).status == 404


async def test_a_second_model_that_is_not_ready_yet(site: Any, connect: Any) -> None:
    site.gateway.set_pending("big", "downloading")
    chat = {"model": "big", "messages": [{"role": "user", "content": "x"}]}
    answer = await get(connect, site, "/v1/chat/completions", "POST", chat)
    assert (answer.status, answer.error["code"]) == (503, "model_not_ready")


async def test_health(site: Any, connect: Any) -> None:
    body = (await get(connect, site, "/health")).json
    assert body["status"] == "healthy"
    assert body["version"] == dynamo.__version__
    assert body["uptime"] == "00:00:00"
    assert body["gpu_memory_usage"] is None
    assert body["active_requests"] == 0
    assert body["models"] == ["words", "spoken"]


async def test_version_and_head(site: Any, connect: Any) -> None:
    assert (await get(connect, site, "/version")).json == {"version": dynamo.__version__}
    assert (await get(connect, site, "/live", "HEAD")).status == 200
    assert (await get(connect, site, "/ready")).json == {"status": "ready"}


async def test_unknown_paths_name_the_nearest(site: Any, connect: Any) -> None:
    for path, near in (
        ("/v/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/model", "/v1/models"),
        ("/healthz", "/health"),
        ("/v1", "/v1/chat/completions"),
        ("/v1/v1/models", "/v1/models"),
        ("/models/", "/v1/models"),
        ("/", "/v1/chat/completions"),
        ("/" + "x" * 5000, "/v1/models"),
    ):
        answer = await get(connect, site, path)
        assert (answer.status, answer.error["code"]) == (404, "not_found")
        assert near in answer.error["hint"]


@pytest.mark.parametrize(
    ("path", "api", "instead"),
    [
        ("/api/chat", "Ollama", "/v1/chat/completions"),
        ("/api/tags", "Ollama", "/v1/models"),
        ("/api/generate", "Ollama", "/v1/completions"),
        ("/api/blobs/sha256:0", "Ollama", "dynamo run"),
        ("/completion", "llama.cpp", "/v1/completions"),
        ("/generate_stream", "TGI", "/v1/completions"),
        ("/v2/chat", "Cohere", "/v1/chat/completions"),
        ("/v2/models/m/infer", "Triton", "/v1/completions"),
        ("/openai/deployments/m/embeddings", "Azure", "/v1/embeddings"),
        ("/api/v0/models", "LM Studio", "/v1/models"),
        ("/v1/models/m:generateContent", "Gemini", "/v1/chat/completions"),
        ("/v1beta/models/m:streamGenerateContent", "Gemini", "/v1/chat/completions"),
    ],
)
async def test_paths_of_other_servers_are_named(
    site: Any, connect: Any, path: str, api: str, instead: str
) -> None:
    answer = await get(connect, site, path, "POST", {})
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert api in answer.error["message"]
    assert instead in answer.error["hint"]


def test_the_paths_to_use_instead_exist() -> None:
    server, gateway = ServerSettings(), Gateway()
    application = Application(server, gateway, SystemClock(), Registry())
    for paths in FOREIGN_PATHS.values():
        for path, instead in paths.items():
            for method, route in re.findall(r"(GET|POST) (/\S*[a-z])", instead):
                application._routes.find(method, route)
            with pytest.raises(NotFound, match="a path of"):
                application._routes.find("POST", path + "x" * path.endswith("/"))


async def test_browsers_get_a_page_and_programs_the_routes(open_site: Any, connect: Any) -> None:
    for keys in ((), ("secret",)):
        site = await open_site(api_keys=keys)
        async with connect(site.port) as connection:
            connection.ask("GET", "/", None, {"accept": "text/html,*/*;q=0.8"})
            page = await connection.answer()
            connection.ask("GET", "/favicon.ico")
            icon = await connection.answer()
            connection.ask("POST", "/", None, {"accept": "text/html"})
            posted = await connection.answer()
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert (icon.status, icon.headers["content-type"]) == (200, "image/svg+xml")
        text = page.body.decode()
        data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
        assert data["needs_key"] == bool(keys)
        assert data["routes"]["/v1/models"] == ["GET"]
        assert not [secret for secret in ("words", "spoken", "secret") if secret in text]
        assert posted.status == 404
        assert "/v1/chat/completions" in posted.error["hint"]


async def test_what_is_left_out_is_named(site: Any, connect: Any) -> None:
    for path, name in (
        ("/v1/audio/transcriptions", "transcription"),
        ("/v1/images/generations", "images"),
        ("/v1/conversations/c1/items", "conversations"),
        ("/v1/batches", "batches"),
    ):
        answer = await get(connect, site, path, "POST", {})
        assert (answer.status, answer.error["code"]) == (404, "not_found")
        assert f"{name}: not supported" in answer.error["message"]
    batches = await get(connect, site, "/v1/messages/batches", "POST", {})
    assert (batches.status, batches.json["type"]) == (404, "error")


async def test_wrong_methods(site: Any, connect: Any) -> None:
    for method, path, allowed in (
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("DELETE", "/v1/models/words", "GET"),
        ("POST", "/health", "GET"),
    ):
        answer = await get(connect, site, path, method)
        assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
        assert answer.headers["allow"] == allowed


async def test_tokenize(site: Any, connect: Any) -> None:
    body = {"model": "words", "prompt": "a bb"}
    answer = await get(connect, site, "/tokenize", "POST", body)
    assert answer.json == {
        "count": 3,
        "max_model_len": 100_000,
        "tokens": [1, 1, 2],
        "token_strs": None,
    }
    body |= {"add_special_tokens": False, "return_token_strs": True}
    answer = await get(connect, site, "/tokenize", "POST", body)
    assert (answer.json["tokens"], answer.json["token_strs"]) == ([1, 2], ["x", "xx"])
    chat = {"messages": [{"role": "user", "content": "ccc"}]}
    assert (await get(connect, site, "/tokenize", "POST", chat)).json["tokens"] == [3]
    for wrong in ({"model": "words"}, chat | {"tools": [{}]}, {"prompt": 5}):
        assert (await get(connect, site, "/tokenize", "POST", wrong)).status == 400


async def test_tokenize_of_a_conversation_as_it_would_be_answered(site: Any, connect: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {
        "messages": [{"role": "assistant", "content": "a"}],
        "tools": [tool],
        "continue_final_message": True,
        "add_special_tokens": True,
        "chat_template_kwargs": {"thinking": False},
    }
    answer = await get(connect, site, "/tokenize", "POST", body)
    assert answer.json["tokens"] == [1, 1]
    request = site.processor.requests[-1]
    assert (request.tools, request.continue_final) == ((tool,), True)
    assert request.template_args == {"thinking": False}
    body |= {"continue_final_message": False, "add_generation_prompt": False}
    await get(connect, site, "/tokenize", "POST", body)
    assert not site.processor.requests[-1].add_generation_prompt


async def test_tokenize_of_llama_cpp(site: Any, connect: Any) -> None:
    body: dict[str, Any] = {"content": "a bb"}
    assert (await get(connect, site, "/tokenize", "POST", body)).json == {"tokens": [1, 2]}
    body |= {"add_special": True, "with_pieces": True}
    assert (await get(connect, site, "/tokenize", "POST", body)).json["tokens"] == [
        *({"id": 1, "piece": [0xC3]}, {"id": 1, "piece": [0xC3]}),
        {"id": 2, "piece": "y"},
    ]


async def test_tokenizer_info(site: Any, connect: Any) -> None:
    answer = await get(connect, site, "/tokenizer_info")
    assert answer.json == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "</s>",
        "model_max_length": 100_000,
    }


async def test_detokenize(site: Any, connect: Any) -> None:
    answer = await get(connect, site, "/detokenize", "POST", {"model": "words", "tokens": [1, 2]})
    assert answer.json == {"prompt": "x xx"}
    answer = await get(connect, site, "/detokenize", "POST", {"tokens": [1, 2]})
    assert answer.json == {"prompt": "x xx", "content": "x xx"}
    for wrong in ({"tokens": [-1]}, {"tokens": "x"}, {}):
        assert (await get(connect, site, "/detokenize", "POST", wrong)).status == 400


async def test_completions(site: Any, connect: Any) -> None:
    path = "/v1/completions"
    body = (await get(connect, site, path, "POST", {"model": "words", "prompt": "a b"})).json
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "text": "a b ",
            "prompt_logprobs": None,
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    many = {"model": "words", "prompt": ["a b", "c"], "n": 2, "echo": True}
    body = (await get(connect, site, path, "POST", many)).json
    assert [choice["text"] for choice in body["choices"]] == ["a b ", "a b ", "c ", "c "]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 6
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert all(request.echo for request in site.processor.requests[-2:])
    assert len({context.request_id for context in site.processor.contexts[-2:]}) == 2
    for prompt, texts in (([5, 6], ["id5 id6 "]), ([[5], [6, 7]], ["id5 ", "id6 id7 "])):
        body = (await get(connect, site, path, "POST", {"model": "words", "prompt": prompt})).json
        assert [choice["text"] for choice in body["choices"]] == texts


async def test_completions_stream(site: Any, connect: Any) -> None:
    body = {"model": "words", "prompt": "a b", "stream": True, "logprobs": 1}
    events = (await get(connect, site, "/v1/completions", "POST", body)).events
    assert events[0]["choices"][0] == {
        "index": 0,
        "text": "a ",
        "logprobs": {
            "text_offset": [0],
            "token_logprobs": [-0.5],
            "tokens": ["a "],
            "top_logprobs": [{"a 0": 0.0, "a ": -0.5}],
        },
        "finish_reason": None,
    }
    assert events[1]["choices"][0]["logprobs"]["text_offset"] == [2]
    assert events[2]["choices"][0]["finish_reason"] == "length"
    assert events[3] == "[DONE]"


def test_completion_logprobs_name_partial_characters_by_bytes() -> None:
    whole = "\ufffd".encode()
    top = (("\ufffd", b"\xf0\x9f", -0.5), ("\ufffd", b"\xe6", -1.0), ("\ufffd", whole, -2.0))
    logprobs = completion_logprobs([DecodedTokenLogprob("\ufffd", b"\x98", -3.0, top, 4)])
    assert logprobs.tokens == ["bytes:\\x98"]
    assert logprobs.text_offset == [4]
    assert logprobs.top_logprobs == [
        {"bytes:\\xf0\\x9f": -0.5, "bytes:\\xe6": -1.0, "\ufffd": -2.0, "bytes:\\x98": -3.0}
    ]
