"""Translation of requests into TensorRT-LLM's, and of its outputs."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from typing import Any

import msgspec

from dynamo.core.errors import InvalidRequest, WorkerFailed
from dynamo.core.reply import LogprobsPerToken
from dynamo.core.values import GenerateRequest, StructuredOutput, TokenLogprobs
from dynamo.inference.engines.engine import GREEDY, EngineAnswer


class TrtllmTranslator:
    """Makes TensorRT-LLM's SamplingParams."""

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self._eos_token_ids = list(eos_token_ids)

    def sampling_params(self, request: GenerateRequest, max_tokens: int) -> Any:
        """Return SamplingParams. Raises `InvalidRequest`."""
        sampling, stops = request.sampling, request.stops
        greedy = sampling.temperature <= GREEDY
        seed = sampling.seed + request.choice + (request.resumed << 20)
        fields = {
            "max_tokens": max_tokens,
            "min_tokens": min(stops.min_tokens, max_tokens),
            "temperature": None if greedy else sampling.temperature,
            "top_k": 1 if greedy else sampling.top_k,
            "top_p": None if greedy else sampling.top_p,
            "min_p": sampling.min_p or None,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "seed": seed % (1 << 63),
            "end_id": self._eos_token_ids[0] if self._eos_token_ids else -1,
            "stop_token_ids": [*self._eos_token_ids[1:], *stops.stop_token_ids]
            if not stops.ignore_eos
            else list(stops.stop_token_ids),
            "ignore_eos": stops.ignore_eos,
            "detokenize": False,
        }
        if request.top_logprobs is not None:
            fields["logprobs"] = max(request.top_logprobs, 1)  # 0 switches them off
        if request.structured is not None:
            fields["guided_decoding"] = _structure(request.structured)
        try:
            return import_module("tensorrt_llm").SamplingParams(**fields | request.extra)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"TensorRT-LLM refuses the request: {error}") from error

    def forward(
        self, result: Any, answer: EngineAnswer, sent: int, request: GenerateRequest
    ) -> tuple[int, bool]:
        """Pass one result on, of which `sent` ids were passed on before. Returns how many there
        are now and whether the answer goes on. Raises `WorkerFailed` if TensorRT-LLM ended it."""
        output = result.outputs[0]
        reason, cached_tokens = output.finish_reason, getattr(result, "cached_tokens", 0) or 0
        if reason not in (None, "stop", "length"):
            raise WorkerFailed(f"TensorRT-LLM ended the request: {reason}")
        ids = list(output.token_ids[sent:])
        logprobs = _read_logprobs(output, sent, ids, request.top_logprobs)
        stop_token = output.stop_reason if isinstance(output.stop_reason, int) else None
        if reason == "stop" and stop_token is None and ids and ids[-1] in self._eos_token_ids:
            stop_token = ids.pop()  # the end id stays in the output, other stop ids do not
        if ids and not answer.send(ids, logprobs, cached_tokens):
            return sent + len(ids), False
        if reason is None:
            return sent + len(ids), True
        if answer.cached_tokens is None:
            answer.cached_tokens = cached_tokens
        answer.finish(reason, stop_token)
        return sent + len(ids), False


def _structure(structured: StructuredOutput) -> Any:
    params = import_module("tensorrt_llm.sampling_params").GuidedDecodingParams
    if structured.kind == "choice":
        choices = msgspec.json.decode(structured.value, type=list[str])
        return params(json=msgspec.json.encode({"enum": choices}).decode())
    if structured.kind == "json_object":
        return params(json_object=True)
    names = {"json_schema": "json", "regex": "regex", "grammar": "grammar"}
    return params(**{names[structured.kind]: structured.value})


def _read_logprobs(
    output: Any, sent: int, ids: list[int], top_logprobs: int | None
) -> LogprobsPerToken | None:
    if top_logprobs is None or not ids:
        return None
    result = []
    for token, position in zip(ids, output.logprobs[sent:], strict=False):
        ranked = sorted(position.items(), key=lambda entry: entry[1].rank or 0)
        best = tuple((other, entry.logprob) for other, entry in ranked[:top_logprobs])
        result.append(TokenLogprobs(token, position[token].logprob, best))
    return result
