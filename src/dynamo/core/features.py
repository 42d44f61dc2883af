"""Features that a request may need and not every engine has."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.core.values import Feature, GenerateRequest

GRAMMAR_FEATURES: tuple[Feature, ...] = (
    "structured",
    "whitespace",
    "thinking_budget",
    "form_after_reasoning",
    "calls",
)
"""Further features of the native and the mock engine, if they know the model's tokenizer."""


def required_features(request: GenerateRequest) -> Sequence[Feature]:
    """Return the features without which an engine cannot answer the request."""
    required: list[Feature] = []
    if request.top_logprobs is not None:
        required.append("logprobs")
    if request.prompt_logprobs is not None:
        required.append("prompt_logprobs")
    if request.sampling.logit_bias:
        required.append("logit_bias")
    form = request.structured
    if form is not None:
        if form.reasoning_limit is not None and not form.soft_limit:
            required.append("thinking_budget")
        if form.kind != "text" and not form.optional:
            own = form.kind == "calls" or request.resumed  # only these engines feed tokens again
            required.append("calls" if own else "structured")
            if form.reasoning_end and not form.reasoning_start:
                required.append("form_after_reasoning")
            if form.whitespace_pattern:
                required.append("whitespace")
    if request.adapter:
        required.append("adapters")
    if request.extra:
        required.append("extra")
    if request.text is not None:
        required.append("text")
    return required
