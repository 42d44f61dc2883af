"""The tables of what is sent to foreign engines: no parameter of a request is dropped."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest
from msgspec.structs import replace

from dynamo.core.errors import InvalidRequest, Unsupported
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions, StructuredOutput
from dynamo.inference.engines.parameters import FormTable, ParameterTable
from dynamo.inference.llamacpp import request as llamacpp
from dynamo.inference.openai_server import completion
from dynamo.inference.sglang import requests as sglang
from dynamo.inference.trtllm import requests as trtllm
from dynamo.inference.vllm import requests as vllm
from dynamo_conformance.engines import make_request

REQUEST = replace(make_request(), sampling=SamplingParams(), stops=StopConditions())
CHANGES: dict[str, Any] = {
    "sampling.temperature": 0.25,
    "sampling.top_p": 0.5,
    "sampling.top_k": 7,
    "sampling.min_p": 0.125,
    "sampling.presence_penalty": 0.5,
    "sampling.frequency_penalty": 0.75,
    "sampling.repetition_penalty": 1.5,
    "sampling.seed": 9,
    "sampling.logit_bias": {5: 2.0},
    "stops.max_tokens": 3,
    "stops.min_tokens": 2,
    "stops.stop_token_ids": (7,),
    "stops.ignore_eos": True,
}
TABLES: dict[str, tuple[ParameterTable, set[str]]] = {
    "vllm": (vllm.PARAMETERS, set()),
    "sglang": (sglang.SEEDED_PARAMETERS, set()),
    # A bias is no feature of this engine, and its stop ids depend on the card.
    "trtllm": (trtllm.PARAMETERS, {"sampling.logit_bias", "stops.stop_token_ids"}),
    "llamacpp": (llamacpp.PARAMETERS, {"stops.stop_token_ids"}),  # ends by our own check
    "url": (completion.PARAMETERS, set()),
    "url of an unknown server": (
        completion.OPENAI_PARAMETERS,
        {
            *("sampling.top_k", "sampling.min_p", "sampling.repetition_penalty"),
            "stops.stop_token_ids",
        },
    ),
}
"""Tables, and the parameters that they leave out on purpose."""
REFUSED = {
    "llamacpp": ("stops.min_tokens",),
    "url of an unknown server": ("stops.min_tokens", "stops.ignore_eos"),
}


def changed(path: str, value: Any) -> GenerateRequest:
    part, _, name = path.partition(".")
    return replace(REQUEST, **{part: replace(attrgetter(part)(REQUEST), **{name: value})})


@pytest.mark.parametrize("path", CHANGES)
@pytest.mark.parametrize("engine", TABLES)
def test_each_parameter_is_sent_or_refused(engine: str, path: str) -> None:
    table, left_out = TABLES[engine]
    request = changed(path, CHANGES[path])
    if path in REFUSED.get(engine, ()):
        with pytest.raises(Unsupported, match=f"has no {path.partition('.')[2]}"):
            table.translate(request)
        return
    after = table.translate(request)
    assert (after != table.translate(REQUEST)) == (path not in left_out)
    assert after.keys() <= table.names


def test_choices_and_resumed_answers_have_seeds_of_their_own() -> None:
    for table, _ in TABLES.values():
        requests = (REQUEST, replace(REQUEST, choice=1), replace(REQUEST, resumed=1))
        assert len({str(table.translate(request)) for request in requests}) == 3


@pytest.mark.parametrize("temperature", [0.0, 1e-7])
def test_the_most_probable_token_needs_no_temperature(temperature: float) -> None:
    request = changed("sampling.temperature", temperature)
    for table in (sglang.PARAMETERS, llamacpp.PARAMETERS):
        assert table.translate(request)["temperature"] == 0.0
    parameters = trtllm.PARAMETERS.translate(request)
    assert (parameters["temperature"], parameters["top_p"], parameters["top_k"]) == (None, None, 1)


@pytest.mark.parametrize(
    "forms", [vllm.FORMS, sglang.FORMS, trtllm.FORMS, llamacpp.FORMS, completion.FORMS]
)
def test_a_structured_output_is_sent_or_refused(forms: FormTable) -> None:
    for kind, value in {
        "json_schema": '{"type": "object"}',
        "json_object": "",
        "regex": "a+",
        "choice": '["a"]',
        "grammar": "root ::= x",
    }.items():
        structured = StructuredOutput(kind, value)  # type: ignore[arg-type]
        if kind in forms.rows:
            assert len(forms.translate(structured)) == 1
        else:
            with pytest.raises(Unsupported, match=f"{forms.title} has no {kind}") as caught:
                forms.translate(structured)
            assert caught.value.hint
    assert forms.translate(None) == forms.translate(StructuredOutput("text")) == {}


def test_choices_that_cannot_be_read_are_the_callers_error() -> None:
    for forms in (sglang.FORMS, trtllm.FORMS, llamacpp.FORMS):
        with pytest.raises(InvalidRequest, match="not a choice"):
            forms.translate(StructuredOutput("choice", "[1]"))
