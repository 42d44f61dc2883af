"""Features that a request may need and not every engine has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dynamo.core.values import Feature, GenerateRequest, StructuredOutput

GRAMMAR_FEATURES: tuple[Feature, ...] = (
    "structured",
    "whitespace",
    "thinking_budget",
    "form_after_reasoning",
    "calls",
    "resumed_form",
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
    if request.structured is not None:
        required += _structured_features(request.structured, resumed=request.resumed > 0)
    if request.adapter:
        required.append("adapters")
    if request.extra:
        required.append("extra")
    if request.text is not None:
        required.append("text")
    return required


def _structured_features(structured: StructuredOutput, *, resumed: bool) -> Iterator[Feature]:
    if structured.reasoning_limit is not None and not structured.soft_limit:
        yield "thinking_budget"
    if structured.kind == "text" or structured.optional:
        return
    yield "calls" if structured.kind == "calls" else "structured"
    if resumed:
        yield "resumed_form"
    if structured.reasoning_end and not structured.reasoning_start:
        yield "form_after_reasoning"
    if structured.whitespace_pattern:
        yield "whitespace"
