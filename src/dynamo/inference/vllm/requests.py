"""Translation of requests into vLLM's, and of its outputs into a reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo.core.codec import unpack_ids
from dynamo.core.errors import (
    InvalidRequest,
    WorkerFailed,
    nearest_name_hint,
)
from dynamo.core.reply import Reply
from dynamo.core.values import (
    Finish,
    GenerateRequest,
    Started,
    StructuredOutput,
    TokenLogprobs,
)
from dynamo.inference.engines.prompt_check import check_prompt
from dynamo.inference.vllm.kv_connector import decode_params, encode_params


class RequestTranslator:
    """Makes vLLM's prompts and SamplingParams. Ids beyond the vocabulary are refused here, since an
    engine that computes one may die."""

    def __init__(self, context_tokens: int, vocab_size: int) -> None:
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        self._context_tokens = context_tokens
        self._vocab_size = vocab_size
        self._params = SamplingParams
        self._structured = StructuredOutputsParams
        self._delta = RequestOutputKind.DELTA
        self._extra_names = {field.name for field in msgspec.structs.fields(SamplingParams)}

    def prompt_ids(self, request: GenerateRequest) -> list[int]:
        """Return the prompt's ids. Raises `InvalidRequest`."""
        ids = list(unpack_ids(request.token_ids))
        check_prompt(ids, self._context_tokens, self._vocab_size)
        return ids

    def sampling_params(self, request: GenerateRequest, prompt_tokens: int) -> Any:
        """Return vLLM's SamplingParams. Raises `InvalidRequest`."""
        sampling, stops = request.sampling, request.stops
        max_tokens = min(stops.max_tokens, self._context_tokens - prompt_tokens)
        structured = request.structured
        try:
            return self._params(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                repetition_penalty=sampling.repetition_penalty,
                seed=make_seed(request) if sampling.temperature else None,
                logit_bias=sampling.logit_bias or None,
                max_tokens=max_tokens,
                min_tokens=min(stops.min_tokens, max_tokens),
                stop_token_ids=list(stops.stop_token_ids),
                ignore_eos=stops.ignore_eos,
                logprobs=request.top_logprobs,
                structured_outputs=None if structured is None else self._structure(structured),
                detokenize=False,
                skip_clone=True,
                output_kind=self._delta,
                **self._extra(request),
            )
        except ValueError as error:
            raise InvalidRequest(f"vLLM refuses the request: {error}") from error

    def _structure(self, structured: StructuredOutput) -> Any:
        kind, value = structured.kind, structured.value
        if kind == "choice":
            return self._structured(choice=msgspec.json.decode(value))
        if kind == "json_object":
            return self._structured(json_object=True)
        return self._structured(**{"json" if kind == "json_schema" else kind: value})

    def _extra(self, request: GenerateRequest) -> dict[str, Any]:
        for name in request.extra:
            if name not in self._extra_names or name.startswith("_"):
                hint = nearest_name_hint(name, self._extra_names, "see vLLM's SamplingParams")
                raise InvalidRequest(f"vLLM has no parameter {name!r}", hint=hint, param=name)
        further = request.extra.get("extra_args") or {}
        if "kv_transfer_params" in further:  # wrong ones kill the engine
            raise InvalidRequest("kv_transfer_params are set by dynamo", param="extra_args")
        if not request.kv:
            return request.extra
        params = {"kv_transfer_params": decode_params(request.kv)}
        return request.extra | {"extra_args": further | params}


def make_seed(request: GenerateRequest) -> int:
    """Return a seed for this choice at this position, which vLLM's generators accept."""
    return (request.sampling.seed + request.choice + (request.resumed << 20)) % (1 << 63)


class OutputForwarder:
    """Passes vLLM's outputs of one request to its reply."""

    def __init__(self, reply: Reply, prompt_tokens: int, top_logprobs: int | None) -> None:
        self._reply = reply
        self._prompt_tokens = prompt_tokens
        self._top_logprobs = top_logprobs
        self.begun = False
        self.tokens = 0
        self.cached_tokens: int | None = None

    def begin(self, cached_tokens: int = 0) -> None:
        """Begin the reply, unless it has begun."""
        if not self.begun:
            self.begun = True
            self._reply.begin(
                Started(cached_tokens=cached_tokens, prompt_tokens=self._prompt_tokens)
            )

    def forward(self, output: Any) -> bool:
        """Pass one output on. Returns False if no more is wanted or the answer is complete. Raises
        `WorkerFailed` if vLLM ended the request."""
        part = output.outputs[0]
        ids, reason = part.token_ids, part.finish_reason
        if ids and not self.tokens:
            self.cached_tokens = output.num_cached_tokens or 0
            self.begin(self.cached_tokens)
        self.tokens += len(ids)
        stop_token: int | None = None
        if reason == "stop" and ids:
            stop_token, ids = ids[-1], ids[:-1]
        if ids and not self._reply.tokens(ids, self._logprobs(ids, part.logprobs)):
            return False
        if reason is None:
            return True
        if reason not in ("stop", "length"):
            raise WorkerFailed(f"vLLM ended the request: {reason}")
        self.begin()
        params = getattr(output, "kv_transfer_params", None)
        kv = encode_params(params) if params else b""
        self._reply.finish(Finish(reason, self.tokens, stop_token, kv))
        return False

    def _logprobs(self, ids: Sequence[int], positions: Any) -> list[TokenLogprobs] | None:
        top = self._top_logprobs
        if top is None or positions is None:
            return None
        result = []
        for token, position in zip(ids, positions, strict=False):
            ranked = sorted(position.items(), key=lambda entry: entry[1].rank or 0)
            best = tuple((other, logprob.logprob) for other, logprob in ranked[:top])
            result.append(TokenLogprobs(token, position[token].logprob, best))
        return result
