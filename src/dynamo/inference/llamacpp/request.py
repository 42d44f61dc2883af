"""The body of a completion for llama.cpp's server."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo.core.errors import InvalidRequest, Unsupported, nearest_name_hint
from dynamo.core.values import Feature, GenerateRequest, StructuredOutput

FEATURES: tuple[Feature, ...] = ("logprobs", "logit_bias", "structured", "extra")

MAX_SEED = (1 << 32) - 1
"""llama.cpp takes this seed for a random one."""
SAMPLERS = ("penalties", "temperature", "min_p", "top_k", "top_p")
"""The order of the native engine and of vLLM."""
GREEDY_TEMPERATURE = 1e-5
EXTRA_NAMES = (
    *("dry_allowed_length", "dry_base", "dry_multiplier", "dry_penalty_last_n"),
    *("dynatemp_exponent", "dynatemp_range", "mirostat", "mirostat_eta", "mirostat_tau"),
    *("top_n_sigma", "typical_p", "xtc_probability", "xtc_threshold"),
)
"""The server's own sampling parameters that a request may have in `extra`."""


def make_body(
    request: GenerateRequest, prompt: tuple[int, ...], context_tokens: int
) -> dict[str, Any]:
    """Return the body without a slot. Penalties count all of the `context_tokens`. Raises
    `Unsupported` for what the server has not."""
    sampling, stops = request.sampling, request.stops
    if stops.min_tokens:
        raise Unsupported(
            "llama.cpp has no min_tokens", param="min_tokens", hint="leave min_tokens out"
        )
    greedy = sampling.temperature < GREEDY_TEMPERATURE
    body = {
        "prompt": prompt,
        "max_tokens": stops.max_tokens,
        "stream": True,
        "return_progress": True,
        "n_probs": max(1, request.top_logprobs or 0),
        "ignore_eos": stops.ignore_eos,
        "temperature": 0.0 if greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": context_tokens,
        "samplers": SAMPLERS,
        "seed": (sampling.seed + request.choice) % MAX_SEED,
    }
    if sampling.logit_bias:
        body["logit_bias"] = [[token, bias] for token, bias in sampling.logit_bias.items()]
    if request.structured is not None:
        body |= structure_fields(request.structured)
    for name, value in request.extra.items():
        if name not in EXTRA_NAMES:
            hint = nearest_name_hint(name, EXTRA_NAMES)
            raise Unsupported(f"llama.cpp takes no parameter {name!r}", hint=hint, param=name)
        body[name] = value
    return body


def structure_fields(structured: StructuredOutput) -> dict[str, Any]:
    """Return the fields that give an answer its form."""
    value = structured.value
    try:
        if structured.kind == "json_schema":
            return {"json_schema": msgspec.json.decode(value)}
        if structured.kind == "choice":
            choices = msgspec.json.decode(value, type=list[str])
            texts = (msgspec.json.encode(text).decode() for text in choices)
            return {"grammar": f"root ::= {' | '.join(texts)}"}
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"not a {structured.kind}: {error}", param="response_format") from None
    if structured.kind == "json_object":
        return {"json_schema": {"type": "object"}}
    if structured.kind == "grammar":
        return {"grammar": value}
    raise Unsupported(
        f"llama.cpp has no {structured.kind} for the form of an answer",
        hint="use a JSON schema, choices, or a grammar (GBNF)",
        param="response_format",
    )
