"""The body of a completion for llama.cpp's server."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo.core.errors import Unsupported, nearest_name_hint
from dynamo.core.values import Feature, GenerateRequest
from dynamo.inference.engines.parameters import (
    FormTable,
    Parameter,
    ParameterTable,
    Seed,
    decode_choices,
    decode_json,
    same,
)

FEATURES: tuple[Feature, ...] = ("logprobs", "logit_bias", "structured", "extra")

MAX_SEED = (1 << 32) - 1
"""llama.cpp takes this seed for a random one."""
SAMPLERS = ("penalties", "temperature", "min_p", "top_k", "top_p")
"""The order of the native engine and of vLLM."""
EXTRA_NAMES = (
    *("dry_allowed_length", "dry_base", "dry_multiplier", "dry_penalty_last_n"),
    *("dynatemp_exponent", "dynatemp_range", "mirostat", "mirostat_eta", "mirostat_tau"),
    *("top_n_sigma", "typical_p", "xtc_probability", "xtc_threshold"),
)
"""The server's own sampling parameters that a request may have in `extra`."""


def _choice_grammar(choices: str) -> str:
    """Return the grammar (GBNF) of one of several texts."""
    texts = (msgspec.json.encode(text).decode() for text in decode_choices(choices))
    return f"root ::= {' | '.join(texts)}"


PARAMETERS = ParameterTable(
    "llama.cpp",
    Parameter("sampling.temperature", "temperature", if_greedy=0.0),
    *same("sampling.top_p", "sampling.top_k", "sampling.min_p", "sampling.presence_penalty"),
    *same("sampling.frequency_penalty", "stops.max_tokens", "stops.ignore_eos"),
    Parameter("sampling.repetition_penalty", "repeat_penalty"),
    Parameter("sampling.logit_bias", "logit_bias", lambda bias: [*bias.items()], absent={}),
    Parameter("top_logprobs", "n_probs", lambda top: max(1, top), absent=None),
    Parameter("stops.min_tokens", refused="leave min_tokens out"),
    seed=Seed("seed", MAX_SEED),
)
FORMS = FormTable(
    "llama.cpp",
    {
        "json_schema": ("json_schema", decode_json),
        "json_object": ("json_schema", lambda _: {"type": "object"}),
        "choice": ("grammar", _choice_grammar),
        "grammar": ("grammar", str),
    },
    "use a JSON schema, choices, or a grammar (GBNF)",
)


def make_body(
    request: GenerateRequest, prompt: tuple[int, ...], context_tokens: int
) -> dict[str, Any]:
    """Return the body without a slot. Penalties count all of the `context_tokens`. Raises
    `Unsupported` for what the server has not."""
    body = PARAMETERS.translate(request) | FORMS.translate(request.structured)
    body |= {
        "prompt": prompt,
        "n_probs": body.get("n_probs", 1),  # else the server sends no ids
        "stream": True,
        "return_progress": True,
        "repeat_last_n": context_tokens,
        "samplers": SAMPLERS,
    }
    for name, value in request.extra.items():
        if name not in EXTRA_NAMES:
            hint = nearest_name_hint(name, EXTRA_NAMES)
            raise Unsupported(f"llama.cpp takes no parameter {name!r}", hint=hint, param=name)
        body[name] = value
    return body
