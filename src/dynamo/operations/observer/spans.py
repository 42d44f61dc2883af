"""The spans of requests, made from their stories by OpenTelemetry's conventions, as protobuf."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Any

import dynamo
from dynamo.core.errors import CANCELLED, ConfigError
from dynamo.core.installation import install_command
from dynamo.operations.observer.stages import StageTime, find_stages, find_worker_stages
from dynamo.operations.observer.stories import KeptStory
from dynamo.telemetry.story import AttemptFacts, EndedStory
from dynamo.telemetry.trace_context import make_span_id

SCHEMA_URL = "https://opentelemetry.io/schemas/1.37.0"
"""The version of the names below. All `gen_ai` names are still in development."""
INTERNAL, SERVER, CLIENT = 1, 2, 3
"""OpenTelemetry's kinds of spans."""
STATUS_ERROR = 2
OPERATIONS = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
OTHER_OPERATIONS = "chat"
SPAN_BY_STAGE = {"tokenise": "tokenise", "admit": "admit", "place": "route"}
WORKER_SPANS = ("queue", "prefill", "transfer", "decode")
REQUEST_ATTRIBUTES = (
    "gen_ai.request.max_tokens",
    "gen_ai.request.temperature",
    "gen_ai.request.top_p",
    "gen_ai.request.top_k",
    "gen_ai.request.seed",
    "gen_ai.request.frequency_penalty",
    "gen_ai.request.presence_penalty",
    "gen_ai.request.stop_sequences",
    "gen_ai.request.stream",
)
"""Names of `EndedStory.options`."""
CLIENT_CLOSED = 499
REPEATED_TYPES = (str, int, bool)
UNIQUE = ("dynamo.request.id", "dynamo.client.request.id")
"""Attributes that differ from request to request."""
MAX_ENCODED = 4_096


def load_trace_types() -> Any:
    """Return the types of spans. Raises `ConfigError` without the library."""
    try:
        from opentelemetry.proto.trace.v1 import trace_pb2
    except ImportError:
        raise ConfigError(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, and the package opentelemetry-proto is missing",
            hint=f"{install_command('otel')}, or set OTEL_SDK_DISABLED=true",
        ) from None
    return trace_pb2


class SpanEncoder:
    """Encodes the spans of requests as an ExportTraceServiceRequest. Raises `ConfigError` without
    the library. `resource`: attributes of the deployment. `statuses`: HTTP statuses by error
    code."""

    def __init__(self, resource: Mapping[str, str], statuses: Mapping[str, int]) -> None:
        self._types: Any = load_trace_types()
        self._resource, self._statuses = resource, statuses

    def encode(self, entries: Iterable[KeptStory]) -> bytes:
        """Return the message. Call in a thread: a request takes about 40 us."""
        data = self._types.TracesData()
        resource = data.resource_spans.add(schema_url=SCHEMA_URL)
        for name, value in self._resource.items():
            _add_attribute(resource.resource.attributes, name, value)
        scope = resource.scope_spans.add(schema_url=SCHEMA_URL)
        scope.scope.name, scope.scope.version = "dynamo", dynamo.__version__
        for entry in entries:
            maker = _SpanMaker(entry.story, scope.spans)
            maker.add_root(entry.process, self._statuses)
            maker.add_frontend_stages()
            maker.add_attempts()
        return bytes(data.SerializeToString())


def _add_attributes(message: Any, attributes: Mapping[str, Any]) -> None:
    repeated = []
    for name, value in attributes.items():
        if type(value) in REPEATED_TYPES and name not in UNIQUE:
            repeated.append(_encode_attribute(name, value))
        else:
            _add_attribute(message.attributes, name, value)
    message.MergeFromString(b"".join(repeated))


def _add_attribute(target: Any, name: str, value: Any) -> None:
    shown = target.add(key=name).value
    kind = type(value)
    if kind is str:
        shown.string_value = value
    elif kind is int:
        shown.int_value = value
    elif kind is float:
        shown.double_value = value
    elif kind is bool:
        shown.bool_value = value
    else:
        for text in value:
            shown.array_value.values.add().string_value = text


@lru_cache(MAX_ENCODED, typed=True)
def _encode_attribute(name: str, value: Any) -> bytes:
    """Return a span that has only this attribute. Most requests have the same ones."""
    span = load_trace_types().Span()
    _add_attribute(span.attributes, name, value)
    return bytes(span.SerializeToString())


def worker_name(instance: str) -> str:
    """Return the name of a worker without the random part of its instance id."""
    return instance.rpartition("-")[0] or instance


def _child_id(span_id: str, number: int) -> str:
    """Return the id of the child `number`, below 128. No other span of a trace has it, unless the
    ids of two parents differ in their last byte only."""
    return f"{span_id[:-2]}{int(span_id[-2:], 16) ^ (number + 1):02x}"


class _SpanMaker:
    """Adds the spans of one request to `spans`. Children are within their parents."""

    def __init__(self, story: EndedStory, spans: Any) -> None:
        self._story, self._spans = story, spans
        self._trace_id = bytes.fromhex(story.trace)
        self._root_id = make_span_id(story.request_id)
        self._stages = find_stages(story)
        self._began_ns = int(story.wall_s * 1e6) * 1_000

    def _at(self, us: int) -> int:
        if us < 0:
            return self._began_ns
        return self._began_ns + min(us, self._story.ended_us) * 1_000

    def _add(
        self,
        name: str,
        kind: int,
        ids: tuple[str, str],
        times_ns: tuple[int, int],
        attributes: Mapping[str, Any],
        error: str = "",
    ) -> Any:
        """Add a span and return it. `ids`: its own and its parent's, hexadecimal; "": no parent.
        `times_ns`: begin and end since 1970. `error`: the code of what failed, "" for success."""
        span_id, parent_id = ids
        span = self._spans.add(name=name, kind=kind)
        span.trace_id, span.span_id = self._trace_id, bytes.fromhex(span_id)
        span.start_time_unix_nano, span.end_time_unix_nano = times_ns
        if parent_id:
            span.parent_span_id = bytes.fromhex(parent_id)
        if state := self._story.trace_state:
            span.trace_state = state
        if error and error != CANCELLED:
            span.status.code, span.status.message = STATUS_ERROR, error
        _add_attributes(span, attributes)
        return span

    def add_root(self, process: str, statuses: Mapping[str, int]) -> None:
        """Add the span of the whole request."""
        story = self._story
        operation = OPERATIONS.get(story.path, OTHER_OPERATIONS)
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "dynamo",
            "gen_ai.request.model": story.model,
            "gen_ai.response.model": story.model,
            "gen_ai.usage.input_tokens": story.prompt_tokens,
            "gen_ai.usage.output_tokens": story.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": story.cached_tokens,
            "http.request.method": "POST",
            "http.route": story.path,
            "http.response.status_code": self._status(statuses),
            "service.instance.id": process,
            "dynamo.request.id": story.request_id,
            "dynamo.longest_gap_s": story.gap_us / 1e6,
            "dynamo.moves": len(story.attempts) - len({each.choice for each in story.attempts}),
        }
        options = zip(REQUEST_ATTRIBUTES, story.options or (), strict=False)
        attributes |= {name: value for name, value in options if value is not None}
        if story.choices != 1:
            attributes["gen_ai.request.choice.count"] = story.choices
        if story.first_us is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = story.first_us / 1e6
        if story.client_id != story.request_id:
            attributes["dynamo.client.request.id"] = story.client_id
        if story.attempts:
            attributes["dynamo.router.mode"] = story.attempts[0].mode
        if story.end not in ("", CANCELLED):
            attributes["error.type"] = story.end
        name, ids = f"{operation} {story.model}".strip(), (self._root_id, story.parent_id)
        times_ns = self._began_ns, self._at(story.ended_us)
        root = self._add(name, SERVER, ids, times_ns, attributes, story.end)
        for before, after in self._with_previous():
            if before is not None:
                move = root.events.add(name="moved", time_unix_nano=self._at(after.placed_us))
                _add_attribute(move.attributes, "dynamo.move.from", before.worker)
                _add_attribute(move.attributes, "dynamo.move.to", after.worker)
                _add_attribute(move.attributes, "dynamo.move.reason", before.error)
                _add_attribute(move.attributes, "dynamo.move.token", after.resumed)

    def _status(self, statuses: Mapping[str, int]) -> int:
        story = self._story
        if not story.end or story.first_us is not None:  # the head of the stream was sent
            return int(HTTPStatus.OK)
        if story.end == CANCELLED:
            return CLIENT_CLOSED
        return statuses.get(story.end, int(HTTPStatus.INTERNAL_SERVER_ERROR))

    def _with_previous(self) -> Iterator[tuple[AttemptFacts | None, AttemptFacts]]:
        """Yield each attempt with the one before of the same prompt and choice."""
        previous: dict[str, AttemptFacts] = {}
        for attempt in self._story.attempts:
            answer = attempt.key.rpartition("/")[0] or str(attempt.choice)
            yield previous.get(answer), attempt
            previous[answer] = attempt

    def add_frontend_stages(self) -> None:
        """Add the spans of stages outside of workers."""
        for number, stage in enumerate(self._stages):
            name = SPAN_BY_STAGE.get(stage.name)
            if name is not None:
                waited_for = self._story.waited_for if name == "admit" else ""
                ids = _child_id(self._root_id, number), self._root_id
                times_ns = self._at(stage.began_us), self._at(stage.began_us + stage.us)
                attributes = {"dynamo.admit.waited_for": waited_for} if waited_for else {}
                self._add(name, INTERNAL, ids, times_ns, attributes)

    def _worker_stages(self, attempt: AttemptFacts) -> Sequence[StageTime]:
        """Return the stages of an attempt, which are known where a request has only one."""
        if len(self._story.attempts) == 1:
            return self._stages
        return find_worker_stages(attempt)

    def add_attempts(self) -> None:
        """Add the span of each attempt, and those of its stages at the worker."""
        for before, attempt in self._with_previous():
            span_id = make_span_id(attempt.key)
            began_ns = self._at(attempt.placed_us)
            ended_ns = max(began_ns, self._at(attempt.ended_us))
            name, ids = worker_name(attempt.worker), (span_id, self._root_id)
            attributes, times_ns = _attempt_attributes(attempt, name), (began_ns, ended_ns)
            span = self._add(f"generate {name}", CLIENT, ids, times_ns, attributes, attempt.error)
            if before is not None:
                lost_id = bytes.fromhex(make_span_id(before.key))
                span.links.add(trace_id=self._trace_id, span_id=lost_id)
            for number, stage in enumerate(self._worker_stages(attempt)):
                if stage.name in WORKER_SPANS:
                    stage_ns = max(began_ns, min(self._at(stage.began_us), ended_ns))
                    until_ns = min(max(self._at(stage.began_us + stage.us), stage_ns), ended_ns)
                    ids = _child_id(span_id, number), span_id
                    attributes = _stage_attributes(stage.name, attempt)
                    self._add(stage.name, INTERNAL, ids, (stage_ns, until_ns), attributes)


def _attempt_attributes(attempt: AttemptFacts, name: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "dynamo.worker.name": name,
        "dynamo.worker.id": attempt.worker,
        "dynamo.router.overlap_blocks": attempt.overlap_blocks,
    }
    if attempt.predicted_us is not None:
        attributes["dynamo.router.predicted_ttft_s"] = attempt.predicted_us / 1e6
    if attempt.prefill_worker:
        attributes["dynamo.prefill_worker.id"] = attempt.prefill_worker
    if attempt.resumed:
        attributes["dynamo.resumed_tokens"] = attempt.resumed
    if attempt.error:
        attributes["error.type"] = attempt.error
    return attributes


def _stage_attributes(stage: str, attempt: AttemptFacts) -> dict[str, Any]:
    times = attempt.times
    if times is None:
        return {}
    worker, known = attempt.worker, dict[str, Any]()
    if stage == "queue":
        known["dynamo.ahead_requests"] = times.ahead_requests
        known["dynamo.ahead_tokens"] = times.ahead_tokens
    elif stage == "transfer":
        known["dynamo.kv_from"] = times.kv_from or None
    elif stage == "decode":
        known["dynamo.preemptions"] = times.preemptions
        known["dynamo.recomputed_tokens"] = times.recomputed_tokens
    elif attempt.prefill_worker and times.peer_prefill_s:
        worker = attempt.prefill_worker
    return {"dynamo.worker.id": worker} | {
        name: value for name, value in known.items() if value is not None
    }
