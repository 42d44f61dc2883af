"""Translation of requests into vLLM's, and of its outputs into a reply."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import msgspec

from dynamo.core.errors import (
    InvalidRequest,
    WorkerFailed,
    nearest_name_hint,
)
from dynamo.core.values import (
    GenerateRequest,
    PromptTokenLogprob,
    StructuredOutput,
    TokenLogprobs,
)
from dynamo.inference.engines.engine import EngineAnswer
from dynamo.inference.vllm.kv_connector import decode_params, encode_params


class RequestTranslator:
    """Makes vLLM's SamplingParams."""

    def __init__(self) -> None:
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        self._params = SamplingParams
        self._structured = StructuredOutputsParams
        self._delta = RequestOutputKind.DELTA
        self._extra_types = {
            field.name: field.type for field in msgspec.structs.fields(SamplingParams)
        }
        self.refusals: tuple[type[Exception], ...] = (ValueError, _client_error())

    def sampling_params(self, request: GenerateRequest, max_tokens: int) -> Any:
        """Return vLLM's SamplingParams. Raises `InvalidRequest`."""
        sampling, stops = request.sampling, request.stops
        structured = request.structured
        try:
            params = dict[str, Any](
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                repetition_penalty=sampling.repetition_penalty,
                seed=make_seed(request),
                logit_bias=sampling.logit_bias or None,
                max_tokens=max_tokens,
                min_tokens=min(stops.min_tokens, max_tokens),
                stop_token_ids=list(stops.stop_token_ids),
                ignore_eos=stops.ignore_eos,
                logprobs=request.top_logprobs,
                prompt_logprobs=request.prompt_logprobs,
                structured_outputs=None if structured is None else self._structure(structured),
                detokenize=False,
                skip_clone=True,
                output_kind=self._delta,
                **_thinking_budget(structured),
            )
            return self._params(**params, **self._extra(request, params))
        except self.refusals as error:
            raise InvalidRequest(f"vLLM refuses the request: {error}") from error

    def _structure(self, structured: StructuredOutput) -> Any:
        kind, value = structured.kind, structured.value
        if kind == "text":
            return None
        if kind == "choice":
            return self._structured(choice=msgspec.json.decode(value))
        if kind == "json_object":
            return self._structured(json_object=True)
        names = {"json_schema": "json", "calls": "grammar"}
        return self._structured(**{names.get(kind, kind): value})

    def _extra(self, request: GenerateRequest, own: Container[str]) -> dict[str, Any]:
        """Return further parameters of the caller. A value of a wrong type would stop the engine
        core, which decodes it outside of any request."""
        extra = dict[str, Any]()
        for name, value in request.extra.items():
            if name not in self._extra_types or name.startswith("_"):
                hint = nearest_name_hint(name, self._extra_types, "see vLLM's SamplingParams")
                raise InvalidRequest(f"vLLM has no parameter {name!r}", hint=hint, param=name)
            if name in own or name == "n":
                raise InvalidRequest(f"extra: {name} is set by dynamo", param=name)
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


def _thinking_budget(structured: StructuredOutput | None) -> dict[str, int]:
    """Return the field for a limit of reasoning, which older versions do not have."""
    limit = None if structured is None else structured.reasoning_limit
    return {} if limit is None else {"thinking_token_budget": limit}


def make_seed(request: GenerateRequest) -> int | None:
    """Return a seed for this choice at this position, which vLLM's generators accept, or None.

    A request with a seed has a generator of its own, with which vLLM neither samples the requests
    of a batch at once nor uses FlashInfer.
    """
    if request.sampling.random_seed or not request.sampling.temperature:
        return None
    return (request.sampling.seed + request.choice + (request.resumed << 20)) % (1 << 63)


def forward_output(output: Any, answer: EngineAnswer, request: GenerateRequest) -> bool:
    """Pass one output on. Returns False if no more is wanted or the answer is complete. Raises
    `WorkerFailed` if vLLM ended the request."""
    if request.prompt_logprobs is not None and output.prompt_logprobs:
        answer.prompt_logprobs = _read_prompt_logprobs(output, request)
    part = output.outputs[0]
    ids, reason = part.token_ids, part.finish_reason
    stop_token: int | None = None
    if reason == "stop" and ids:
        stop_token, ids = ids[-1], ids[:-1]
    if ids:
        logprobs = _read_logprobs(ids, part.logprobs, request.top_logprobs)
        if not answer.send(ids, logprobs, output.num_cached_tokens or 0):
            return False
    if reason is None:
        return True
    if reason == "repetition":  # of `extra`
        reason = "stop"
    if reason not in ("stop", "length"):
        raise WorkerFailed(f"vLLM ended the request: {reason}")
    if answer.cached_tokens is None and stop_token is not None:
        answer.cached_tokens = output.num_cached_tokens or 0
        answer.begin(answer.cached_tokens)
    params = getattr(output, "kv_transfer_params", None)
    answer.finish(reason, stop_token, encode_params(params) if params else b"")
    return False


def _read_prompt_logprobs(output: Any, request: GenerateRequest) -> tuple[PromptTokenLogprob, ...]:
    """Return those of the second token and on, without the tokens of an earlier attempt."""
    ids, positions, top = output.prompt_token_ids, output.prompt_logprobs, request.prompt_logprobs
    count = len(ids) - request.resumed
    entries = []
    for token, position in zip(ids[1:count], positions[1:count], strict=True):
        ranked = sorted(position.items(), key=lambda entry: entry[1].rank or 0)
        best = tuple((other, logprob.logprob) for other, logprob in ranked[:top])
        own = position[token]
        entries.append(PromptTokenLogprob(token, own.logprob, own.rank or 0, best))
    return tuple(entries)


def _read_logprobs(
    ids: Sequence[int], positions: Any, top: int | None
) -> list[TokenLogprobs] | None:
    if top is None or positions is None:
        return None
    result = []
    for token, position in zip(ids, positions, strict=False):
        ranked = sorted(position.items(), key=lambda entry: entry[1].rank or 0)
        best = tuple((other, logprob.logprob) for other, logprob in ranked[:top])
        result.append(TokenLogprobs(token, position[token].logprob, best))
    return result
