"""The fields that chat and completion bodies share: OpenAI's and vLLM's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from dynamo.application.openai.structured import read_structured_output
from dynamo.core.errors import InvalidRequest, Unsupported
from dynamo.core.text import SamplingOverrides, TextOptions
from dynamo.core.values import StructuredOutput

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
"""Limit of each stop string."""
MAX_TOKEN_ENTRIES = 1024
"""Limit of `stop_token_ids` and of `logit_bias`."""
MAX_SALT_BYTES = 256
MAX_NAME_BYTES = 1024
"""Limit of a name that a client chooses: a model, a user, labels."""

TIER_PRIORITIES = {"flex": -(1 << 31), "priority": 1 << 31}
"""The `priority` of a `service_tier`. Each is clamped to `server.priority_range`."""

STRUCTURE_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)

_read_forms = attrgetter(*STRUCTURE_FIELDS)
_NO_FORMS = (None,) * len(STRUCTURE_FIELDS)

NVEXT_FIELDS = {
    name: name
    for name in (
        *("ignore_eos", "top_k", "min_p", "repetition_penalty", "cache_salt"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    )
} | {"max_thinking_tokens": "thinking_token_budget"}
"""Fields of Dynamo's `nvext`, and those with the same meaning here."""
NVEXT_NEUTRAL = ("annotations", "extra_fields", "greed_sampling", "use_raw_prompt")
"""Fields of `nvext` that change nothing where they are false or empty."""

TokenCount = Annotated[int, Meta(ge=0, le=1 << 31)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
_TOKEN_ID = re.compile("[0-9]{1,9}")
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class Neutral:
    """Marks a known but unsupported field; only `values` and None do not change the answer.
    `instead`: the field here with the same meaning."""

    def __init__(self, *values: Any, instead: str = "") -> None:
        self.values = values
        self.instead = instead


class StreamOptions(msgspec.Struct, frozen=True):
    """The field `stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """The fields of both kinds of request; None means absent."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: str | list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    seed: Int64 | None = None
    logit_bias: dict[TokenId | str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    min_tokens: TokenCount | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), le=1 << 31)] | None = None
    service_tier: str | None = None
    user: str | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None

    best_of: Annotated[Any, Neutral(1)] = None
    use_beam_search: Annotated[Any, Neutral(False)] = None
    length_penalty: Annotated[Any, Neutral(1, 1.0)] = None
    allowed_token_ids: Annotated[Any, Neutral()] = None
    bad_words: Annotated[Any, Neutral([])] = None
    logits_processors: Annotated[Any, Neutral([])] = None
    truncate_prompt_tokens: Annotated[Any, Neutral()] = None
    return_token_ids: Annotated[Any, Neutral(False)] = None
    return_tokens_as_token_ids: Annotated[Any, Neutral(False)] = None

    nvext: dict[str, Any] | None = None
    guided_decoding_backend: Annotated[Any, Neutral()] = None
    guided_whitespace_pattern: Annotated[Any, Neutral(instead="structured_outputs")] = None
    kv_transfer_params: Annotated[Any, Neutral({})] = None
    vllm_xargs: Annotated[Any, Neutral({})] = None
    include_reasoning: Annotated[Any, Neutral(True)] = None

    regex: Annotated[Any, Neutral(instead="structured_outputs.regex")] = None
    ebnf: Annotated[Any, Neutral(instead="structured_outputs.grammar")] = None
    json_schema: Annotated[Any, Neutral(instead="response_format")] = None
    grammar: Annotated[Any, Neutral("", instead="structured_outputs.grammar")] = None
    separate_reasoning: Annotated[Any, Neutral(True)] = None
    stream_reasoning: Annotated[Any, Neutral(True)] = None
    reasoning_format: Annotated[Any, Neutral("auto", "deepseek")] = None
    stop_regex: Annotated[Any, Neutral([], instead="stop")] = None
    no_stop_trim: Annotated[Any, Neutral(False, instead="include_stop_str_in_output")] = None
    lora_path: Annotated[Any, Neutral(instead="model")] = None
    custom_logit_processor: Annotated[Any, Neutral()] = None
    return_hidden_states: Annotated[Any, Neutral(False)] = None
    session_params: Annotated[Any, Neutral({})] = None

    max_new_tokens: Annotated[Any, Neutral(instead="max_tokens")] = None
    n_predict: Annotated[Any, Neutral(instead="max_tokens")] = None
    max_length: Annotated[Any, Neutral(instead="max_tokens")] = None
    num_predict: Annotated[Any, Neutral(instead="max_tokens")] = None
    min_new_tokens: Annotated[Any, Neutral(0, instead="min_tokens")] = None
    repeat_penalty: Annotated[Any, Neutral(1, 1.0, instead="repetition_penalty")] = None
    do_sample: Annotated[Any, Neutral(True, instead="temperature")] = None
    num_beams: Annotated[Any, Neutral(1)] = None
    typical_p: Annotated[Any, Neutral(1, 1.0)] = None
    top_a: Annotated[Any, Neutral(0, 0.0)] = None
    tfs_z: Annotated[Any, Neutral(1, 1.0)] = None
    mirostat: Annotated[Any, Neutral(0)] = None
    dynatemp_range: Annotated[Any, Neutral(0, 0.0)] = None
    xtc_probability: Annotated[Any, Neutral(0, 0.0)] = None
    dry_multiplier: Annotated[Any, Neutral(0, 0.0)] = None
    samplers: Annotated[Any, Neutral()] = None
    lora: Annotated[Any, Neutral([], instead="model")] = None
    watermark: Annotated[Any, Neutral(False)] = None
    truncate: Annotated[Any, Neutral()] = None
    options: Annotated[Any, Neutral({})] = None
    format: Annotated[Any, Neutral("", instead="response_format")] = None


class UnsupportedFields:
    """The fields of a body type that are marked `Neutral`."""

    def __init__(self, body_type: type[msgspec.Struct]) -> None:
        self._marks: dict[str, Neutral] = {
            field.name: mark
            for field in msgspec.structs.fields(body_type)
            for mark in get_args(field.type)[1:]
            if isinstance(mark, Neutral)
        }
        self._read_fields = attrgetter(*self._marks)
        self._all_unset = (None,) * len(self._marks)

    def check(self, body: msgspec.Struct) -> None:
        """Raise `Unsupported` for a field with a value that would change the answer."""
        values = self._read_fields(body)
        if values == self._all_unset:
            return
        for (name, mark), value in zip(self._marks.items(), values, strict=True):
            same = (value == item and type(value) is type(item) for item in mark.values)
            if value is not None and not any(same):
                hint = f"send {mark.instead}" if mark.instead else f"leave {name} out"
                raise Unsupported(f"{name} is not supported", hint=hint, param=name)


def text_options(
    body: GenerationBody, max_tokens: int | None, top_logprobs: int | None, *, soft: bool = False
) -> TextOptions:
    """Return the options for the processor. Raises `InvalidRequest`, `Unsupported`.

    `soft`: engines without `thinking_token_budget` answer without it. Every field is bounded,
    because each choice is sent to a worker with all of them.
    """
    if body.nvext:
        _apply_nvext(body, body.nvext)
    # Fields that depend on each other, and the sizes of those that few requests have.
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("only with stream: true", field="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise Unsupported("not in a stream", hint="leave stream out", field="prompt_logprobs")
    if body.cache_salt or body.stop_token_ids or body.logit_bias or body.user:
        _check_sizes(body)
    # The structured output of one field at most; a limit of reasoning needs one, too.
    structured, field = None, ""
    if (forms := _read_forms(body)) != _NO_FORMS:
        fields = dict(zip(STRUCTURE_FIELDS, forms, strict=True))
        structured, field = read_structured_output(fields)
    if body.thinking_token_budget is not None and body.thinking_token_budget >= 0:
        structured = replace(
            structured or StructuredOutput("text"),
            reasoning_limit=body.thinking_token_budget,
            soft_limit=soft,
        )
    return TextOptions(
        n=body.n or 1,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stop=() if body.stop is None else _stop_strings(body.stop),
        stop_token_ids=tuple(body.stop_token_ids) if body.stop_token_ids else (),
        ignore_eos=body.ignore_eos is True,
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop=body.include_stop_str_in_output is True,
        top_logprobs=top_logprobs,
        prompt_logprobs=body.prompt_logprobs,
        count_tokens=(stream := body.stream_options) is not None
        and bool(stream.include_usage and stream.continuous_usage_stats),  # as in vLLM
        sampling=_sampling(body),
        salt=body.cache_salt or "",
        priority=body.priority or TIER_PRIORITIES.get(body.service_tier or "", 0),
        structured=structured,
        structured_field=field,
    )


def _apply_nvext(body: GenerationBody, extension: dict[str, Any]) -> None:
    """Set the fields of Dynamo's extension that have a field of their own here. Raises
    `Unsupported` for others, and `InvalidRequest` for a wrong type."""
    for name, value in extension.items():
        field = NVEXT_FIELDS.get(name)
        if value is None or (name in NVEXT_NEUTRAL and not value):
            continue
        if field is None:
            raise Unsupported(
                f"nvext.{name} is not supported",
                hint=f"leave it out; supported: {', '.join(NVEXT_FIELDS)}",
                param="nvext",
            )
        if getattr(body, field) is None:
            setattr(body, field, _converted(body, field, value, f"nvext.{name}"))


def _converted(body: GenerationBody, field: str, value: Any, name: str) -> Any:
    """Return a value that has the type of a field. Raises `InvalidRequest`."""
    (kind,) = (item.type for item in msgspec.structs.fields(body) if item.name == field)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), field=name, param="nvext") from None


def _sampling(body: GenerationBody) -> SamplingOverrides:
    top_k = body.top_k
    return SamplingOverrides(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=0 if top_k == -1 else top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        logit_bias=_token_biases(body.logit_bias) if body.logit_bias else None,
    )


def _token_biases(biases: Mapping[int | str, float]) -> dict[int, float]:
    """Return the biases by token id. Raises `InvalidRequest` that names the other keys."""
    keys = [str(key) for key in biases]
    others = [key[:64] for key in keys if not _TOKEN_ID.fullmatch(key)]
    if others:
        raise InvalidRequest(
            f"expected token ids as keys, got {', '.join(map(repr, others[:10]))}",
            hint="/tokenize returns the ids of a text",
            field="logit_bias",
        )
    return dict(zip(map(int, keys), biases.values(), strict=True))


def check_size(field: str, size: int, limit: int, unit: str = "entries", *, what: str = "") -> None:
    """Raise `InvalidRequest` if a field has more `unit` than its limit, or `what` it contains."""
    if size > limit:
        counted = f"{what}: " if what else ""
        raise InvalidRequest(f"{counted}{size:,} {unit}, limit {limit:,}", field=field)


def _check_sizes(body: GenerationBody) -> None:
    """Check the fields that few requests have."""
    check_size("cache_salt", len((body.cache_salt or "").encode()), MAX_SALT_BYTES, "bytes")
    check_size("stop_token_ids", len(body.stop_token_ids or ()), MAX_TOKEN_ENTRIES)
    check_size("logit_bias", len(body.logit_bias or ()), MAX_TOKEN_ENTRIES)
    check_size("user", len((body.user or "").encode()), MAX_NAME_BYTES, "bytes")


def _stop_strings(stop: str | list[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    check_size("stop", len(stops), MAX_STOP_STRINGS, "strings")
    for string in stops:
        check_size("stop", len(string), MAX_STOP_CHARS, "characters in a string")
    if "" in stops:
        raise InvalidRequest("an empty string would end every answer at once", field="stop")
    return stops
