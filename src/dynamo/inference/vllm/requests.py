"""Translation of requests into vLLM's, and of its outputs into a reply."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import msgspec

from dynamo.core.errors import InvalidRequest, WorkerFailed, nearest_name_hint
from dynamo.core.timing.worker_times import WorkerTimes
from dynamo.core.values import GenerateRequest, PromptTokenLogprob
from dynamo.inference.engines.answer import ForeignAnswer, best_of, read_ranked_logprobs
from dynamo.inference.engines.parameters import (
    GUIDED_DECODING,
    FormTable,
    Parameter,
    ParameterTable,
    Seed,
    check_extra,
    same,
)
from dynamo.inference.vllm.kv_connector import decode_params, encode_params

PARAMETERS = ParameterTable(
    "vLLM",
    *same("sampling.temperature", "sampling.top_p", "sampling.top_k", "sampling.min_p"),
    *same("sampling.presence_penalty", "sampling.frequency_penalty"),
    *same("sampling.repetition_penalty", "stops.max_tokens", "stops.min_tokens"),
    *same("stops.ignore_eos", "prompt_logprobs"),
    Parameter("top_logprobs", "logprobs"),
    Parameter("stops.stop_token_ids", "stop_token_ids", list),
    Parameter("sampling.logit_bias", "logit_bias", absent={}),
    # A seeded request has a generator of its own: vLLM does not sample it with the others of a
    # batch, nor by FlashInfer.
    seed=Seed("seed", 1 << 63, if_random=False, if_greedy=False),
)
FORMS = FormTable("vLLM", {**GUIDED_DECODING, "calls": ("grammar", str)})
OWN_NAMES = PARAMETERS.names | {"n", "structured_outputs"}
"""Names that no caller sets beside ours, sent or not."""


class RequestTranslator:
    """Makes vLLM's SamplingParams. `refusals`: errors by which vLLM refuses a request."""

    def __init__(self) -> None:
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        self._params = SamplingParams
        self._structured = StructuredOutputsParams
        self._delta = RequestOutputKind.DELTA
        self._extra_types = {
            field.name: field.type for field in msgspec.structs.fields(SamplingParams)
        }
        self.refusals: tuple[type[Exception], ...] = (ValueError, _client_error())

    def sampling_params(self, request: GenerateRequest) -> Any:
        """Return vLLM's SamplingParams. Raises `InvalidRequest` and the `refusals`."""
        params = PARAMETERS.translate(request)
        structured = request.structured
        if structured is not None:
            field = FORMS.translate(structured)
            params["structured_outputs"] = self._structured(**field) if field else None
            if structured.reasoning_limit is not None:  # older versions have no such field
                params["thinking_token_budget"] = structured.reasoning_limit
        params |= {"detokenize": False, "skip_clone": True, "output_kind": self._delta}
        return self._params(**params, **self._extra(request, params))

    def _extra(self, request: GenerateRequest, own: Container[str]) -> dict[str, Any]:
        """Return further parameters of the caller. A value of a wrong type would stop the engine
        core, which decodes it outside of any request."""
        check_extra(request.extra, own, OWN_NAMES)
        extra = dict[str, Any]()
        for name, value in request.extra.items():
            if name not in self._extra_types or name.startswith("_"):
                hint = nearest_name_hint(name, self._extra_types, "see vLLM's SamplingParams")
                raise InvalidRequest(f"vLLM has no parameter {name!r}", hint=hint, param=name)
            try:
                extra[name] = msgspec.convert(value, self._extra_types[name])
            except msgspec.ValidationError as error:
                raise InvalidRequest(f"extra: {name}: {error}", param=name) from None
        further = extra.get("extra_args") or {}
        if "kv_transfer_params" in further:  # wrong ones kill the engine
            raise InvalidRequest("kv_transfer_params are set by dynamo", param="extra_args")
        if not request.kv:
            return extra
        params = {"kv_transfer_params": decode_params(request.kv)}
        return extra | {"extra_args": further | params}


def _client_error() -> type[Exception]:
    """Return vLLM's class for errors of a request; older versions raise `ValueError`."""
    try:
        from vllm.exceptions import VLLMClientError
    except ImportError:
        return ValueError
    error: type[Exception] = VLLMClientError
    return error


def forward_output(output: Any, answer: ForeignAnswer) -> bool:
    """Pass one output on. Returns False if no more is wanted or the answer is complete. Raises
    `WorkerFailed` if vLLM ended the request."""
    request = answer.request
    if request.prompt_logprobs is not None and output.prompt_logprobs:
        answer.prompt_logprobs = _read_prompt_logprobs(output, request)
    part = output.outputs[0]
    ids, reason, cached_tokens = part.token_ids, part.finish_reason, output.num_cached_tokens or 0
    stop_token: int | None = None
    if reason == "stop" and ids:
        stop_token, ids = ids[-1], ids[:-1]
    if ids:
        top, logprobs = request.top_logprobs, None
        if top is not None and part.logprobs is not None:
            logprobs = read_ranked_logprobs(ids, part.logprobs, top)
        if not answer.send(ids, logprobs, cached_tokens):
            return False
    if reason is None:
        return True
    if reason == "repetition":  # of `extra`
        reason = "stop"
    if reason not in ("stop", "length"):
        raise WorkerFailed(f"vLLM ended the request: {reason}")
    answer.times = read_times(getattr(output, "metrics", None), answer.ahead)
    params = getattr(output, "kv_transfer_params", None)
    answer.finish(reason, stop_token, cached_tokens, kv=encode_params(params) if params else b"")
    return False


def read_times(stats: Any, ahead: tuple[int, int, int]) -> WorkerTimes | None:
    """Return the times of a request by vLLM's `RequestStateStats`, all of its core's clock; None
    where vLLM tells none. `ahead`: as in `ForeignAnswer`."""
    names = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
    queued, scheduled, first, last = (getattr(stats, name, 0.0) or 0.0 for name in names)
    if not 0.0 < queued <= scheduled <= first <= last:
        return None
    requests, tokens, longest = ahead
    return WorkerTimes(
        ahead_requests=requests,
        ahead_tokens=tokens,
        ahead_longest=longest,
        queue_s=scheduled - queued,
        prefill_s=first - scheduled,
        decode_s=last - first,
        preemptions=getattr(stats, "num_preemptions", None),  # older versions do not count them
    )


def _read_prompt_logprobs(output: Any, request: GenerateRequest) -> tuple[PromptTokenLogprob, ...]:
    """Return those of the second token and on, without the tokens of an earlier attempt."""
    ids, positions, top = output.prompt_token_ids, output.prompt_logprobs, request.prompt_logprobs
    count = len(ids) - request.resumed
    return tuple(
        PromptTokenLogprob(
            token, position[token].logprob, position[token].rank or 0, best_of(position, top)
        )
        for token, position in zip(ids[1:count], positions[1:count], strict=True)
    )
