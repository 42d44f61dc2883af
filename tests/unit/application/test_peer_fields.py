"""Fields of vLLM, SGLang, llama.cpp, TGI, Ollama and Dynamo: obeyed, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
REFUSED: dict[str, Any] = {
    "guided_decoding_backend": "xgrammar", "guided_whitespace_pattern": " ", "vllm_xargs": {"a": 1},
    "kv_transfer_params": {"do_remote_decode": True}, "include_reasoning": False,
    "bad_words": ["x"], "allowed_token_ids": [1], "return_token_ids": True,
    "regex": "a+", "ebnf": "root ::= x", "json_schema": SCHEMA, "stop_regex": "a+",
    "separate_reasoning": False, "stream_reasoning": False, "no_stop_trim": True,
    "lora_path": "x", "custom_logit_processor": "x", "return_hidden_states": True,
    "session_params": {"id": "x"}, "grammar": "root ::= x", "n_predict": 5,
    "reasoning_format": "none", "repeat_penalty": 1.3, "typical_p": 0.5, "tfs_z": 0.5,
    "mirostat": 2, "dynatemp_range": 0.5, "xtc_probability": 0.5, "dry_multiplier": 0.8,
    "samplers": ["top_k"], "lora": [{"id": 0, "scale": 1}], "top_a": 0.5,
    "max_new_tokens": 5, "min_new_tokens": 5, "max_length": 5, "do_sample": False, "num_beams": 2,
    "watermark": True, "truncate": 5, "num_predict": 5, "options": {"num_ctx": 9}, "format": "json",
}  # fmt: skip
NEUTRAL: dict[str, Any] = {
    "include_reasoning": True, "separate_reasoning": True, "typical_p": 1.0, "mirostat": 0,
    "do_sample": True, "stop_regex": [], "reasoning_format": "auto", "grammar": "", "options": {},
    "nvext": {"annotations": [], "use_raw_prompt": False, "top_k": None},
}  # fmt: skip


async def ask(connect: Any, site: Any, **fields: Any) -> Any:
    async with connect(site.port) as connection:
        body = {"model": "words", "messages": HI, **fields}
        connection.ask("POST", "/v1/chat/completions", body)
        return await connection.answer()


@pytest.mark.parametrize("name", REFUSED)
async def test_a_field_that_would_change_the_answer_is_refused_by_name(
    site: Any, connect: Any, name: str
) -> None:
    answer = await ask(connect, site, **{name: REFUSED[name]})
    assert (answer.status, answer.error["param"]) == (400, name)
    assert answer.error["message"].startswith(f"{name} is not supported")
    assert not site.processor.requests


async def test_values_that_change_nothing_pass(site: Any, connect: Any) -> None:
    assert (await ask(connect, site, **NEUTRAL)).status == 200


async def test_fields_of_nvext_are_those_of_the_request(site: Any, connect: Any) -> None:
    extension = {"ignore_eos": True, "top_k": 5, "repetition_penalty": 1.2, "guided_regex": "a+"}
    assert (await ask(connect, site, nvext=extension, top_k=7)).status == 200
    options = site.processor.requests[-1].options
    assert (options.ignore_eos, options.sampling.top_k) == (True, 7)
    assert options.sampling.repetition_penalty == 1.2
    assert (options.structured.kind, options.structured.value) == ("regex", "a+")


@pytest.mark.parametrize(
    ("extension", "words"),
    [
        ({"backend_instance_id": 7}, "nvext.backend_instance_id is not supported"),
        ({"annotations": ["token_ids"]}, "nvext.annotations is not supported"),
        ({"ignore_eos": "yes"}, "nvext.ignore_eos: Expected"),
    ],
)
async def test_other_fields_of_nvext_are_refused(
    site: Any, connect: Any, extension: dict[str, Any], words: str
) -> None:
    answer = await ask(connect, site, nvext=extension)
    assert (answer.status, answer.error["param"]) == (400, "nvext")
    assert words in answer.error["message"]


@pytest.mark.parametrize("key", ["schema", "value"])
async def test_a_schema_beside_json_object_is_obeyed(site: Any, connect: Any, key: str) -> None:
    answer = await ask(connect, site, response_format={"type": "json_object", key: SCHEMA})
    assert answer.status == 200
    assert site.processor.requests[-1].options.structured.kind == "json_schema"
