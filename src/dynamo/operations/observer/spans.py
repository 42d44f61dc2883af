"""The spans of a request, made from its story, by OpenTelemetry's conventions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from dynamo.core.errors import CANCELLED
from dynamo.operations.observer.stages import StageTime, find_stages, find_worker_stages
from dynamo.operations.observer.stories import KeptStory
from dynamo.telemetry.story import AttemptFacts, EndedStory
from dynamo.telemetry.trace_context import make_span_id

SCHEMA_URL = "https://opentelemetry.io/schemas/1.37.0"
"""The version of the names below. All `gen_ai` names are still in development."""
INTERNAL, SERVER, CLIENT = 1, 2, 3
"""OpenTelemetry's kinds of spans."""
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


class SpanEvent(NamedTuple):
    """An event within a span, at a time in nanoseconds since 1970."""

    name: str
    at_ns: int
    attributes: Mapping[str, Any]


class TraceSpan(NamedTuple):
    """A span. Ids are hexadecimal, times nanoseconds since 1970. `error`: the code of what failed,
    "" for success. `link`: the id of another span of the trace. `parent_id`: "" for a root."""

    span_id: str
    parent_id: str
    name: str
    kind: int
    began_ns: int
    ended_ns: int
    attributes: Mapping[str, Any]
    error: str = ""
    events: tuple[SpanEvent, ...] = ()
    link: str = ""


def worker_name(instance: str) -> str:
    """Return the name of a worker without the random part of its instance id."""
    return instance.rpartition("-")[0] or instance


def _child_id(span_id: str, number: int) -> str:
    """Return the id of the child `number`, below 128. No other span of a trace has it, unless the
    ids of two parents differ in their last byte only."""
    return f"{span_id[:-2]}{int(span_id[-2:], 16) ^ (number + 1):02x}"


def make_spans(entry: KeptStory, statuses: Mapping[str, int]) -> list[TraceSpan]:
    """Return the spans of a request, its root first. `statuses`: HTTP statuses by error code."""
    maker = _SpanMaker(entry.story)
    return [maker.root(entry.process, statuses), *maker.frontend_stages(), *maker.attempts()]


class _SpanMaker:
    """Makes the spans of one request. Children are within their parents."""

    def __init__(self, story: EndedStory) -> None:
        self._story = story
        self._root_id = make_span_id(story.request_id)
        self._stages = find_stages(story)
        self._began_ns = int(story.wall_s * 1e6) * 1_000

    def _at(self, us: int) -> int:
        if us < 0:
            return self._began_ns
        return self._began_ns + min(us, self._story.ended_us) * 1_000

    def root(self, process: str, statuses: Mapping[str, int]) -> TraceSpan:
        """Return the span of the whole request."""
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
        error = "" if story.end == CANCELLED else story.end
        if error:
            attributes["error.type"] = error
        name = f"{operation} {story.model}".strip()
        ended_ns = self._at(story.ended_us)
        return TraceSpan(
            self._root_id, story.parent_id, name, SERVER, self._began_ns, ended_ns, attributes,
            error, tuple(self._moves()),
        )  # fmt: skip

    def _status(self, statuses: Mapping[str, int]) -> int:
        story = self._story
        if not story.end or story.first_us is not None:  # the head of the stream was sent
            return int(HTTPStatus.OK)
        if story.end == CANCELLED:
            return CLIENT_CLOSED
        return statuses.get(story.end, int(HTTPStatus.INTERNAL_SERVER_ERROR))

    def _moves(self) -> Iterator[SpanEvent]:
        for before, after in self._with_previous():
            if before is not None:
                facts = {
                    "dynamo.move.from": before.worker,
                    "dynamo.move.to": after.worker,
                    "dynamo.move.reason": before.error,
                    "dynamo.move.token": after.resumed,
                }
                yield SpanEvent("moved", self._at(after.placed_us), facts)

    def _with_previous(self) -> Iterator[tuple[AttemptFacts | None, AttemptFacts]]:
        """Yield each attempt with the one before of the same prompt and choice."""
        previous: dict[str, AttemptFacts] = {}
        for attempt in self._story.attempts:
            answer = attempt.key.rpartition("/")[0] or str(attempt.choice)
            yield previous.get(answer), attempt
            previous[answer] = attempt

    def frontend_stages(self) -> Iterator[TraceSpan]:
        """Yield the spans of stages outside of workers."""
        for number, stage in enumerate(self._stages):
            name = SPAN_BY_STAGE.get(stage.name)
            if name is None:
                continue
            attributes: dict[str, Any] = {}
            if name == "admit" and self._story.waited_for:
                attributes["dynamo.admit.waited_for"] = self._story.waited_for
            yield TraceSpan(
                _child_id(self._root_id, number),
                self._root_id,
                name,
                INTERNAL,
                self._at(stage.began_us),
                self._at(stage.began_us + stage.us),
                attributes,
            )

    def _worker_stages(self, attempt: AttemptFacts) -> Sequence[StageTime]:
        """Return the stages of an attempt, which are known where a request has only one."""
        if len(self._story.attempts) == 1:
            return self._stages
        return find_worker_stages(attempt)

    def attempts(self) -> Iterator[TraceSpan]:
        """Yield the span of each attempt, and those of its stages at the worker."""
        for before, attempt in self._with_previous():
            span_id = make_span_id(attempt.key)
            began_ns, ended_ns = self._at(attempt.placed_us), self._at(attempt.ended_us)
            name = worker_name(attempt.worker)
            error = "" if attempt.error == CANCELLED else attempt.error
            link = "" if before is None else make_span_id(before.key)
            ended_ns = max(began_ns, ended_ns)
            yield TraceSpan(
                span_id, self._root_id, f"generate {name}", CLIENT, began_ns, ended_ns,
                _attempt_attributes(attempt, name), error, (), link,
            )  # fmt: skip
            for number, stage in enumerate(self._worker_stages(attempt)):
                if stage.name in WORKER_SPANS:
                    stage_ns = max(began_ns, min(self._at(stage.began_us), ended_ns))
                    yield TraceSpan(
                        _child_id(span_id, number),
                        span_id,
                        stage.name,
                        INTERNAL,
                        stage_ns,
                        min(max(self._at(stage.began_us + stage.us), stage_ns), ended_ns),
                        _stage_attributes(stage.name, attempt),
                    )


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
