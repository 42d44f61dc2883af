"""A completion of another server: the body of its request, and its events as calls of a `Reply`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, cast

from dynamo.core.clock import Clock
from dynamo.core.errors import MalformedAnswer
from dynamo.core.reply import Reply
from dynamo.core.text import split_cut_character
from dynamo.core.values import EngineTotals, Feature, FinishReason, GenerateRequest, TokenLogprobs
from dynamo.inference.engines.parameters import (
    GUIDED_DECODING,
    FormTable,
    Parameter,
    ParameterTable,
    Seed,
    minus_one_for_none,
    raw_json,
    same,
    text_keys,
)
from dynamo.inference.openai_server.foreign_chunk import ForeignChoice
from dynamo.inference.openai_server.foreign_values import (
    MAX_COUNT,
    read_logprob,
    read_object,
    read_word,
)
from dynamo.inference.openai_server.server_facts import Kind, ServerFacts
from dynamo.inference.openai_server.streamed_answer import ChoiceAnswer

ID_PREFIX = "token_id:"
"""vLLM's logprobs name tokens so, if asked."""
FEATURES: dict[Kind, tuple[Feature, ...]] = {
    "vllm": ("logprobs", "logit_bias", "structured"),
    "sglang": ("logit_bias",),
    "llamacpp": ("logprobs", "logit_bias", "structured", "extra"),
    "dynamo": ("logit_bias",),
    "openai": ("logit_bias",),
}
GIVES_IDS: frozenset[Kind] = frozenset({"vllm", "sglang"})
EncodeText = Callable[[str], Sequence[int]]
TITLE = "the model's server"
_OPENAI = (
    *same("sampling.temperature", "sampling.top_p", "sampling.presence_penalty"),
    *same("sampling.frequency_penalty", "stops.max_tokens"),
    Parameter("sampling.logit_bias", "logit_bias", text_keys, absent={}),
)
_SEED = Seed("seed", 1 << 63, if_random=False)
OPENAI_PARAMETERS = ParameterTable(
    TITLE,
    *_OPENAI,
    Parameter("stops.min_tokens", refused="leave min_tokens out"),
    Parameter("stops.ignore_eos", refused="leave ignore_eos out"),
    seed=_SEED,
)
PARAMETERS = ParameterTable(
    TITLE,
    *_OPENAI,
    Parameter("sampling.top_k", "top_k", minus_one_for_none),
    *same("sampling.min_p", "sampling.repetition_penalty"),
    *same("stops.min_tokens", "stops.stop_token_ids", "stops.ignore_eos"),
    Parameter("salt", "cache_salt", absent=""),
    Parameter("top_logprobs", "logprobs", absent=None),
    Parameter("top_logprobs", "return_tokens_as_token_ids", lambda _: True, absent=None),
    seed=_SEED,
)
"""The parameters of vLLM and of servers that take its names."""
FORMS = FormTable(
    TITLE, {**GUIDED_DECODING, "json_schema": ("json", raw_json), "choice": ("choice", raw_json)}
)


def completion_body(
    request: GenerateRequest, prompt: Sequence[int], facts: ServerFacts
) -> dict[str, Any]:
    """Return the body for a server that is not llama.cpp."""
    kind = facts.kind
    body = (OPENAI_PARAMETERS if kind == "openai" else PARAMETERS).translate(request)
    body |= {
        "model": facts.model.id,
        "prompt": prompt,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if kind in GIVES_IDS:
        body["return_token_ids"] = True
    if request.structured is not None:
        body["structured_outputs"] = FORMS.translate(request.structured)
    return body


class CompletionAnswer(ChoiceAnswer):
    """Delivers the tokens of one answer. With `encode`, the server sends text, which is tokenised
    here: the text stands, and `completion_tokens` is the server's count."""

    def __init__(
        self,
        request: GenerateRequest,
        reply: Reply,
        totals: EngineTotals,
        clock: Clock,
        *,
        vocab_size: int,
        encode: EncodeText | None,
    ) -> None:
        super().__init__(request, reply, totals, clock)
        self._top_logprobs = request.top_logprobs
        self._stop_ids = frozenset(request.stops.stop_token_ids)
        self._vocab_size = vocab_size or MAX_COUNT
        self._encode = encode
        if encode is None:
            self._max_parts = self._max_tokens
        self._stop_token: int | None = None
        self._held = ""

    def _deliver_choice(self, choice: ForeignChoice) -> bool:
        ids: Sequence[int]
        if self._encode is not None:
            text, self._held = split_cut_character(self._held + read_word(choice.text))
            ids = self._encode(text) if text else ()
        else:
            ids = self._read_ids(choice.token_ids)
            if not ids and read_word(choice.text):
                raise MalformedAnswer("the server sent text without token ids")
        logprobs: list[TokenLogprobs] | None = None
        if self._top_logprobs is not None and ids:
            logprobs = _logprobs(read_object(choice.logprobs), ids)
        # A stop token ends the answer and is no part of it.
        if ids and choice.finish_reason == "stop" and self._encode is None:
            last = ids[-1]
            if last in self._stop_ids or last == choice.stop_reason:
                ids, self._stop_token = ids[:-1], last
        # Servers may send more tokens than were asked for.
        room = self._max_parts - self.tokens
        sent = ids[:room]
        if sent and not self.send(sent, logprobs and logprobs[: len(sent)]):
            return False
        return len(ids) <= room or self._cut()

    def _read_ids(self, ids: Any) -> Sequence[int]:
        """Return the ids of tokens. Raises `MalformedAnswer` for ids that the model lacks."""
        if not ids:
            return ()
        if type(ids) is list and len(ids) == 1:
            (token,) = ids
            if type(token) is int and 0 <= token < self._vocab_size:
                return ids
        try:
            if min(ids) >= 0 and max(ids) < self._vocab_size and set(map(type, ids)) == {int}:
                return cast("Sequence[int]", ids)
        except (TypeError, ValueError):
            pass
        raise MalformedAnswer("the server sent ids of tokens that the model does not have")

    def _finish(self, reason: FinishReason) -> None:
        if self._held and self._encode is not None and reason == "stop":
            self._reply.tokens(self._encode(self._held))
        count = self.tokens + (self._stop_token is not None)
        if self._encode is not None:
            count = self._usage.completion_tokens or count
        count = min(count, self._max_tokens)
        cached_tokens = self._read_cached_tokens()
        self.finish(reason, self._stop_token, cached_tokens, completion_tokens=count)


def _logprobs(logprobs: Mapping[str, Any], ids: Sequence[int]) -> list[TokenLogprobs]:
    values, tops = logprobs.get("token_logprobs"), logprobs.get("top_logprobs")
    if not isinstance(values, list) or len(values) < len(ids):
        raise MalformedAnswer("the server sent no log probabilities")
    if not isinstance(tops, list):
        tops = []
    return [
        TokenLogprobs(token, read_logprob(value) or 0.0, _top(read_object(top)))
        for token, value, top in zip_longest(ids, values[: len(ids)], tops[: len(ids)])
    ]


def _top(top: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    named = ((name.removeprefix(ID_PREFIX), read_logprob(value)) for name, value in top.items())
    return tuple(
        (int(name), value)
        for name, value in named
        if value is not None and name.isdecimal() and len(name) < 10
    )
