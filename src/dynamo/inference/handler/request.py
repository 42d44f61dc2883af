"""Requests and answers of handlers of tokens, as NVIDIA Dynamo's frontend exchanges them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from dynamo.core.codec import unpack_ids
from dynamo.core.errors import WorkerFailed
from dynamo.core.values import FinishReason, GenerateRequest, StructuredOutput, TokenLogprobs

FINISH_REASONS: Final[Mapping[str, FinishReason]] = {
    "stop": "stop",
    "eos": "stop",
    "length": "length",
    "cancelled": "cancelled",
    "abort": "cancelled",
    "content_filter": "content_filter",
}


class HandlerItem(msgspec.Struct, frozen=True):
    """A part of a handler's answer. `text` counts where there are no ids. `log_probs` and
    `top_logprobs` have an entry for each id."""

    token_ids: list[int] = []
    text: str | None = None
    finish_reason: str | dict[str, Any] | None = None
    log_probs: list[float] | None = None
    top_logprobs: list[list[dict[str, Any]]] | None = None

    @classmethod
    def parse(cls, item: Any) -> HandlerItem:
        """Return what a handler yielded. Raises `WorkerFailed` for another type or an error."""
        try:
            parsed = msgspec.convert(item, cls)
        except msgspec.ValidationError as error:
            raise WorkerFailed(
                f"the handler yielded no part of an answer: {error}",
                hint='yield {"token_ids": [...]}, the last one with "finish_reason"',
            ) from None
        if parsed.finish_reason is not None and parsed.reason is None:
            raise WorkerFailed(f"the handler ended the answer with {parsed.finish_reason!r}")
        return parsed

    @property
    def reason(self) -> FinishReason | None:
        """Why the answer ends with this part, or None."""
        reason = self.finish_reason
        return FINISH_REASONS.get(reason) if isinstance(reason, str) else None

    def logprobs(self, ids: Sequence[int]) -> list[TokenLogprobs] | None:
        """Return the logprobs of the first of the ids, if the handler gave any."""
        if self.log_probs is None:
            return None
        tops = self.top_logprobs or [[] for _ in self.log_probs]
        return [
            TokenLogprobs(
                token, logprob, tuple((each["token_id"], each["logprob"]) for each in top)
            )
            for token, logprob, top in zip(ids, self.log_probs, tops, strict=False)
        ]


UNSET: Final[Mapping[str, Sequence[str]]] = {
    "stop_conditions": ("stop", "stop_token_ids_visible", "max_thinking_tokens"),
    "sampling_options": (
        *("best_of", "use_beam_search", "length_penalty", "include_stop_str_in_output"),
    ),
    "output_options": (
        *("prompt_logprobs", "skip_special_tokens", "formatted_prompt"),
        "return_tokens_as_token_ids",
    ),
}
"""Fields of the parts of a request that are always None here."""


def handler_request(request: GenerateRequest, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Return a request as a handler reads it. Values that clients omit are resolved already."""
    sampling, stops = request.sampling, request.stops
    parts: dict[str, dict[str, Any]] = {
        "stop_conditions": {
            "max_tokens": stops.max_tokens,
            "min_tokens": stops.min_tokens or None,
            "ignore_eos": stops.ignore_eos or None,
            "stop_token_ids": list(stops.stop_token_ids) or None,
            "stop_token_ids_hidden": list(eos_token_ids),
        },
        "sampling_options": {
            "n": 1,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or None,
            "min_p": sampling.min_p or None,
            "presence_penalty": sampling.presence_penalty or None,
            "frequency_penalty": sampling.frequency_penalty or None,
            "repetition_penalty": sampling.repetition_penalty,
            "seed": None if sampling.random_seed else sampling.seed,
            "guided_decoding": _guided_decoding(request.structured),
        },
        "output_options": {"logprobs": request.top_logprobs},
    }
    return {
        "model": request.model,
        "token_ids": list(unpack_ids(request.token_ids)),
        **{name: dict.fromkeys(UNSET[name]) | part for name, part in parts.items()},
        "eos_token_ids": list(eos_token_ids),
        "annotations": [],
        "routing": {},
        "router_config_override": None,
    }


def _guided_decoding(wanted: StructuredOutput | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    if wanted.kind == "json_object":
        return {"json": {"type": "object"}}
    if wanted.kind == "json_schema":
        return {"json": msgspec.json.decode(wanted.value)}
    value = msgspec.json.decode(wanted.value) if wanted.kind == "choice" else wanted.value
    return {wanted.kind: value}
