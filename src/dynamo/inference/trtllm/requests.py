"""Translation of requests into TensorRT-LLM's, and of its outputs."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from typing import Any

from dynamo.core.errors import WorkerFailed
from dynamo.core.values import GenerateRequest
from dynamo.inference.engines.answer import ForeignAnswer, read_ranked_logprobs
from dynamo.inference.engines.parameters import (
    GUIDED_DECODING,
    FormTable,
    Parameter,
    ParameterTable,
    Seed,
    check_extra,
    enum_schema,
    same,
)

PARAMETERS = ParameterTable(
    "TensorRT-LLM",
    Parameter("sampling.temperature", "temperature", if_greedy=None),
    Parameter("sampling.top_p", "top_p", if_greedy=None),
    Parameter("sampling.top_k", "top_k", if_greedy=1),
    Parameter("sampling.min_p", "min_p", absent=0.0),
    *same("sampling.presence_penalty", "sampling.frequency_penalty"),
    *same("sampling.repetition_penalty", "stops.max_tokens", "stops.min_tokens"),
    *same("stops.ignore_eos"),
    Parameter("top_logprobs", "logprobs", lambda top: max(top, 1), absent=None),  # 0 means none
    seed=Seed("seed", 1 << 63),
)
OWN_NAMES = PARAMETERS.names | {"n", "best_of", "use_beam_search"}
FORMS = FormTable("TensorRT-LLM", {**GUIDED_DECODING, "choice": ("json", enum_schema)})


class TrtllmTranslator:
    """Makes TensorRT-LLM's SamplingParams."""

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self._eos_token_ids = list(eos_token_ids)
        self._params = import_module("tensorrt_llm").SamplingParams

    def sampling_params(self, request: GenerateRequest) -> Any:
        """Return SamplingParams. Raises `TypeError` and `ValueError`."""
        ends, stops = self._eos_token_ids, request.stops
        also = [] if stops.ignore_eos else ends[1:]
        params = PARAMETERS.translate(request) | {
            "end_id": ends[0] if ends else -1,
            "stop_token_ids": [*also, *stops.stop_token_ids],
            "detokenize": False,
        }
        if request.structured is not None:
            guided = import_module("tensorrt_llm.sampling_params").GuidedDecodingParams
            params["guided_decoding"] = guided(**FORMS.translate(request.structured))
        check_extra(request.extra, params, OWN_NAMES)
        return self._params(**params | request.extra)

    def forward(self, result: Any, answer: ForeignAnswer) -> bool:
        """Pass one result on, which has all ids so far. Returns False if no more is wanted or the
        answer is complete. Raises `WorkerFailed` if TensorRT-LLM ended it."""
        output, sent, top = result.outputs[0], answer.tokens, answer.request.top_logprobs
        reason, cached_tokens = output.finish_reason, getattr(result, "cached_tokens", 0) or 0
        if reason not in (None, "stop", "length"):
            raise WorkerFailed(f"TensorRT-LLM ended the request: {reason}")
        ids = list(output.token_ids[sent:])
        logprobs = None
        if top is not None and ids:
            logprobs = read_ranked_logprobs(ids, output.logprobs[sent:], top)
        stop_token = output.stop_reason if isinstance(output.stop_reason, int) else None
        if reason == "stop" and stop_token is None and ids and ids[-1] in self._eos_token_ids:
            stop_token = ids.pop()  # the end id stays in the output, other stop ids do not
        if ids and not answer.send(ids, logprobs, cached_tokens):
            return False
        if reason is None:
            return True
        answer.finish(reason, stop_token, cached_tokens)
        return False
