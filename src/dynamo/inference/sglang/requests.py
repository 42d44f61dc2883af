"""Translation of requests into SGLang's, and of its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.core.errors import DynamoError, InvalidRequest, WorkerFailed
from dynamo.core.reply import LogprobsPerToken
from dynamo.core.values import GenerateRequest, TokenLogprobs
from dynamo.inference.engines.answer import ForeignAnswer
from dynamo.inference.engines.parameters import (
    FormTable,
    Parameter,
    ParameterTable,
    Seed,
    check_extra,
    enum_schema,
    minus_one_for_none,
    same,
    text_keys,
)

_ROWS = (
    Parameter("sampling.temperature", "temperature", if_greedy=0.0),
    Parameter("sampling.top_k", "top_k", minus_one_for_none),
    *same("sampling.top_p", "sampling.min_p", "sampling.presence_penalty"),
    *same("sampling.frequency_penalty", "sampling.repetition_penalty", "stops.ignore_eos"),
    Parameter("stops.max_tokens", "max_new_tokens"),
    Parameter("stops.min_tokens", "min_new_tokens"),
    Parameter("stops.stop_token_ids", "stop_token_ids", list),
    Parameter("sampling.logit_bias", "logit_bias", text_keys, absent={}),
)
PARAMETERS = ParameterTable("SGLang", *_ROWS)
SEEDED_PARAMETERS = ParameterTable("SGLang", *_ROWS, seed=Seed("sampling_seed", 1 << 31))
OWN_NAMES = SEEDED_PARAMETERS.names | {"n"}
FORMS = FormTable(
    "SGLang",
    {
        "json_schema": ("json_schema", str),
        "json_object": ("json_schema", lambda _: '{"type": "object"}'),
        "regex": ("regex", str),
        "choice": ("json_schema", enum_schema),
        "grammar": ("ebnf", str),
    },
)


def sampling_params(request: GenerateRequest, *, seeded: bool) -> dict[str, Any]:
    """Return SGLang's sampling parameters. `seeded`: it was started to take seeds."""
    params = (SEEDED_PARAMETERS if seeded else PARAMETERS).translate(request)
    params |= FORMS.translate(request.structured)
    check_extra(request.extra, params, OWN_NAMES)
    return params | request.extra


def forward_output(output: Mapping[str, Any], answer: ForeignAnswer) -> bool:
    """Pass one output on. Returns False if no more is wanted or the answer is complete. Raises an
    error if SGLang ended the request with one.

    The ids of an output are all or the new ones, depending on version and settings. So the new ones
    are counted by `completion_tokens`.
    """
    meta = output["meta_info"]
    reason: Mapping[str, Any] = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise _aborted(reason)
    count, cached_tokens = meta["completion_tokens"] - answer.tokens, meta.get("cached_tokens") or 0
    ids = list(output["output_ids"][-count:]) if count > 0 else []
    logprobs = _read_logprobs(meta, len(ids), answer.request.top_logprobs)
    stop_token = None
    if reason.get("type") == "stop" and ids and ids[-1] == reason.get("matched"):
        stop_token = ids.pop()
    if ids and not answer.send(ids, logprobs, cached_tokens):
        return False
    if not reason:
        return True
    answer.finish("length" if reason["type"] == "length" else "stop", stop_token, cached_tokens)
    return False


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
