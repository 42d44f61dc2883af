"""Requests that need a feature go only to workers whose engine has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.processes import Open
from tests.unit.scheduling.test_router import (
    CONTEXT,
    ENDPOINT,
    REQUEST,
    RecordingReply,
    client_of,
)

from dynamo.communication.requests import ResponseWriter
from dynamo.core.context import Context
from dynamo.core.errors import NoWorkers, Unsupported
from dynamo.core.features import required_features
from dynamo.core.reply import Reply
from dynamo.core.values import GenerateRequest, RequestGroup, SamplingParams, StructuredOutput
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.router import BasicPolicy, WorkerRouter

STRUCTURED = replace(REQUEST, structured=StructuredOutput("regex", "[0-9]+"))
NEEDY = [
    STRUCTURED,
    replace(REQUEST, adapter="poet"),
    replace(REQUEST, extra={"repetition_range": 64}),
    replace(REQUEST, top_logprobs=0),
    replace(REQUEST, sampling=SamplingParams(logit_bias={1: 5.0})),
]


async def serve(
    runtime: DistributedRuntime, features: Sequence[str] | None, kind: str = "native"
) -> str:
    """Serve an endpoint whose engine announces `features`, or those of the native engine, which are left out."""

    async def generate(payload: bytes, out: ResponseWriter) -> None:
        out.send(payload)

    engine: dict[str, Any] = {"engine": kind}
    if features is not None:
        engine["features"] = list(features)
    if "adapters" in engine.get("features", ()):
        engine["adapters"] = {"poet": "/adapters/poet"}
    path = ENDPOINT.split(".")
    endpoint = runtime.namespace(path[0]).component(path[1]).endpoint(path[2])
    await endpoint.serve(generate, capabilities={"engine": engine})
    return runtime.instance_id


async def choose(
    open_runtime: Open, workers: int, request: GenerateRequest, attempt: int = 0
) -> str:
    """Return the worker to which a router sends the request."""
    client = await client_of(await open_runtime(), workers)
    chosen: list[str] = []

    async def send(to: Instance, request: GenerateRequest, context: Context, reply: Reply) -> None:
        chosen.append(to.id)

    router = WorkerRouter(BasicPolicy(client, "round_robin"), send, client=client)
    for _ in range(4):
        await router.send(request, replace(CONTEXT, attempt=attempt), RecordingReply())
    assert len(set(chosen)) == 1
    return chosen[0]


@pytest.mark.parametrize(
    "request_", NEEDY, ids=["structured", "adapter", "extra", "logprobs", "bias"]
)
async def test_a_request_goes_to_the_worker_that_can_answer_it(
    open_runtime: Open, request_: GenerateRequest
) -> None:
    await serve(await open_runtime(), ())
    features = ("structured", "adapters", "extra", "logprobs", "logit_bias")
    able = await serve(await open_runtime(), features)
    assert await choose(open_runtime, 2, request_) == able


async def test_workers_that_announce_no_features_have_those_of_the_native_engine(
    open_runtime: Open,
) -> None:
    await serve(await open_runtime(), ())
    able = await serve(await open_runtime(), None)
    assert await choose(open_runtime, 2, replace(REQUEST, top_logprobs=3)) == able


async def test_a_request_that_no_worker_can_answer_is_refused(open_runtime: Open) -> None:
    await serve(await open_runtime(), None)
    await serve(await open_runtime(), ("adapters",))
    with pytest.raises(Unsupported, match="no worker of this model supports: structured") as caught:
        await choose(open_runtime, 2, replace(STRUCTURED, adapter="poet"))
    assert caught.value.param == "response_format"


async def test_a_retried_request_waits_for_a_worker_that_can_answer_it(open_runtime: Open) -> None:
    await serve(await open_runtime(), None)
    with pytest.raises(NoWorkers):
        await choose(open_runtime, 1, STRUCTURED, attempt=1)


async def test_a_form_goes_on_only_where_its_tokens_are_fed_again(open_runtime: Open) -> None:
    await serve(await open_runtime(), ("structured",))
    resumed = replace(STRUCTURED, resumed=3)
    with pytest.raises(Unsupported):  # waiting for another worker would be of no use
        await choose(open_runtime, 1, resumed, attempt=1)
    limited = replace(resumed, structured=StructuredOutput("text", reasoning_limit=9))
    with pytest.raises(NoWorkers):  # a worker that can may come back
        await choose(open_runtime, 1, limited, attempt=1)
    await serve(await open_runtime(), ("structured", "calls"))
    able = await serve(await open_runtime(), ("structured", "resumed_form", "form_after_reasoning"))
    assert await choose(open_runtime, 3, resumed, attempt=1) == able
    behind = replace(STRUCTURED, structured=StructuredOutput("regex", "a", reasoning_end=b"0000"))
    assert await choose(open_runtime, 3, behind) == able


@pytest.mark.parametrize(
    "change",
    [
        {"adapter": "poet"},
        {"structured": StructuredOutput("json_object")},
        {"kv": b"blocks"},
        {"extra": {"a": 1}},
    ],
)
def test_a_changed_request_is_no_choice_of_its_group(change: dict[str, object]) -> None:
    group = RequestGroup(REQUEST)
    assert group.covers(replace(REQUEST, choice=1))
    assert not group.covers(replace(REQUEST, **change))


LIMIT = StructuredOutput("text", reasoning_limit=5)
SCHEMA = StructuredOutput("json_schema", "{}", reasoning_limit=5)
CALLS = StructuredOutput("calls", "start: x", reasoning_limit=5, optional=True)


@pytest.mark.parametrize(
    ("form", "required", "without", "with_limits"),
    [
        (LIMIT, ["thinking_budget"], LIMIT, LIMIT),
        (replace(LIMIT, soft_limit=True), [], None, replace(LIMIT, soft_limit=True)),
        (SCHEMA, ["thinking_budget", "structured"], SCHEMA, SCHEMA),
        (CALLS, ["thinking_budget"], LIMIT, LIMIT),
        (replace(CALLS, reasoning_limit=None), [], None, None),
        (
            replace(SCHEMA, soft_limit=True),
            ["structured"],
            replace(SCHEMA, reasoning_limit=None, soft_limit=True),
            replace(SCHEMA, soft_limit=True),
        ),
    ],
)
def test_soft_limits_and_optional_forms_are_left_out(
    form: StructuredOutput,
    required: list[str],
    without: StructuredOutput | None,
    with_limits: StructuredOutput | None,
) -> None:
    assert required_features(replace(REQUEST, structured=form)) == required
    assert form.supported_by(("structured",)) == without
    assert form.supported_by(("structured", "calls"), resumed=True) == without
    assert form.supported_by(("structured", "thinking_budget")) == with_limits
