"""Translation of requests into SGLang's, and of its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.core.errors import DynamoError, InvalidRequest, WorkerFailed
from dynamo.core.reply import LogprobsPerToken
from dynamo.core.values import GenerateRequest, StructuredOutput, TokenLogprobs
from dynamo.inference.engines.engine import GREEDY, EngineAnswer


def sampling_params(request: GenerateRequest, max_tokens: int, seeded: bool) -> dict[str, Any]:
    """Return SGLang's sampling parameters."""
    sampling, stops = request.sampling, request.stops
    params = {
        "temperature": sampling.temperature if sampling.temperature > GREEDY else 0.0,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "max_new_tokens": max_tokens,
        "min_new_tokens": min(stops.min_tokens, max_tokens),
        "stop_token_ids": list(stops.stop_token_ids),
        "ignore_eos": stops.ignore_eos,
    }
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if seeded:
        seed = sampling.seed + request.choice + (request.resumed << 20)
        params["sampling_seed"] = seed % (1 << 31)
    if request.structured is not None:
        params |= _structure(request.structured)
    return params | request.extra


def _structure(structured: StructuredOutput) -> dict[str, str]:
    if structured.kind == "choice":
        choices = msgspec.json.decode(structured.value, type=list[str])
        return {"json_schema": msgspec.json.encode({"enum": choices}).decode()}
    if structured.kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    names = {"json_schema": "json_schema", "regex": "regex", "grammar": "ebnf"}
    return {names[structured.kind]: structured.value}


def forward_output(
    output: Mapping[str, Any], answer: EngineAnswer, top_logprobs: int | None
) -> tuple[int, bool]:
    """Pass one output on. Returns the number of new ids and whether the answer goes on. Raises an
    error if SGLang ended the request with one.

    The ids of an output are all or the new ones, depending on version and settings. So the new ones
    are counted by `completion_tokens`.
    """
    meta = output["meta_info"]
    reason: Mapping[str, Any] = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise _aborted(reason)
    count = meta["completion_tokens"] - answer.tokens
    ids = list(output["output_ids"][-count:]) if count > 0 else []
    logprobs = _read_logprobs(meta, len(ids), top_logprobs)
    stop_token = None
    if reason.get("type") == "stop" and ids and ids[-1] == reason.get("matched"):
        stop_token = ids.pop()
    if ids and not answer.send(ids, logprobs, meta.get("cached_tokens") or 0):
        return len(ids), False
    if not reason:
        return len(ids), True
    if answer.cached_tokens is None:
        answer.cached_tokens = meta.get("cached_tokens") or 0
    answer.finish("length" if reason["type"] == "length" else "stop", stop_token)
    return len(ids), False


def _aborted(reason: Mapping[str, Any]) -> DynamoError:
    message = f"SGLang ended the request: {reason.get('message') or 'aborted'}"
    if reason.get("status_code") == 400:
        return InvalidRequest(message)
    return WorkerFailed(message)


def _read_logprobs(
    meta: Mapping[str, Any], count: int, top_logprobs: int | None
) -> LogprobsPerToken | None:
    if top_logprobs is None or not count:
        return None
    chosen: Sequence[Any] = meta["output_token_logprobs"][-count:]
    tops: Sequence[Any] = (meta.get("output_top_logprobs") or [])[-count:] or [None] * count
    return [
        TokenLogprobs(
            token, logprob, tuple((other, value) for value, other, *_ in (top or ())[:top_logprobs])
        )
        for (logprob, token, *_), top in zip(chosen, tops, strict=True)
    ]
