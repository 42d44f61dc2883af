"""The worker's answer to a probe: proof that its engine computes."""

from __future__ import annotations

import msgspec

from dynamo.core.codec import pack_ids
from dynamo.core.context import Context
from dynamo.core.reply import Engine, LogprobsPerToken, Reply
from dynamo.core.values import (
    Finish,
    GenerateRequest,
    ProbeResult,
    SamplingParams,
    Started,
    StopConditions,
)

PROBE_ID = "probe"
CANARY_REQUEST = GenerateRequest(
    PROBE_ID,
    "",
    pack_ids([0]),
    SamplingParams(temperature=0.0),
    StopConditions(max_tokens=1, ignore_eos=True),
    priority=1 << 20,
)

encode_probe_result = msgspec.msgpack.Encoder().encode


class DiscardedReply(Reply):
    """A reply that drops everything."""

    __slots__ = ()

    def begin(self, started: Started) -> None:
        del started

    def tokens(self, ids: object, logprobs: LogprobsPerToken | None = None) -> bool:
        del ids, logprobs
        return True

    def finish(self, end: Finish) -> None:
        del end


async def answer_probe(engine: Engine) -> ProbeResult:
    """Return the engine's progress. An engine without work computes a token first. Requests that
    wait for KV from another worker are no work, nor are those behind them while no other request
    runs: the engine makes no steps for them. Raises the errors of `Engine.generate`."""
    load = engine.report_load()
    if not load.running + load.waiting:
        context = Context(request_id=PROBE_ID)
        await engine.prove_progress(CANARY_REQUEST, context, DiscardedReply())
        load = engine.report_load()
    running = load.running - load.arriving
    blocked = load.arriving > 0 and not running
    return ProbeResult(load.steps, 0 if blocked else running + load.waiting)
