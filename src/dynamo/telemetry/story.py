"""The story of a request: what its stages note while it passes, and the form in which it is sent.

The handler of a route opens a story and passes it to listeners at the request's end. Stages in
between find it by `current_story`, and write down moments that they pass anyway. All else is made
from the story off the serving loops: the record of requests, explanations, `dynamo why`.

A sent story has times in microseconds since the request was there, so that clocks of hosts need not
agree. Values that nobody knows are None, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol
from zlib import crc32

import msgspec

from dynamo.core.text import TextOptions
from dynamo.core.timing.worker_times import WorkerTimes
from dynamo.core.values import GenerateRequest
from dynamo.telemetry.trace_context import TraceContext

NO_OPTIONS = TextOptions()
if TYPE_CHECKING:
    Microseconds = int
else:
    Microseconds = float
    """Whole ones for receivers of a story. Its sender leaves rounding to them."""
US_PER_S: Any = 1e6
FINGERPRINT_BYTES = 1024
"""The first so many bytes of a prompt's ids tell it from others: 256 tokens."""


class Candidate(msgspec.Struct, frozen=True):
    """A worker that could have been chosen. The lowest `cost` wins; `terms` are its summands by
    name, in the policy's unit (milliseconds for predicted times). `decode_worker`: the worker that
    would answer if `worker` computed the prompt for another one. `tier_blocks`: how many of
    `overlap_blocks` it would load, by memory tier."""

    worker: str
    overlap_blocks: int
    cost: float
    terms: dict[str, float]
    decode_worker: str = ""
    tier_blocks: dict[str, int] = {}


class AttemptFacts(msgspec.Struct, array_like=True, gc=False):
    """An attempt of a choice: its decision and what became of it.

    `choosing_us`: the router had the request. `placed_us`: the worker was chosen. `first_us`: its
    first token came. `resumed`: tokens of the answer that earlier attempts sent. `error`: an error
    code, "" for success or a reader that had enough; `reason`: its message. `load`: requests at the
    worker before this one, as the router knew them. `seen_blocks`: those of the prompt that this
    process had seen. `costs`: the best candidates, () where they were not kept. `key`: its name.
    """

    choice: int
    worker: str
    prefill_worker: str
    mode: str
    view: str
    candidates: int
    choosing_us: Microseconds
    placed_us: Microseconds
    first_us: Microseconds | None
    ended_us: Microseconds
    error: str
    reason: str
    resumed: int
    load: int
    queue_length: int
    prompt_tokens: int
    prompt_blocks: int
    overlap_blocks: int
    best_overlap_blocks: int
    seen_blocks: int | None
    cached_tokens: int
    output_tokens: int
    waited_us: Microseconds
    predicted_us: Microseconds | None
    harm_weight: float | None
    itl_slo_ms: float
    times: WorkerTimes | None
    costs: Any = ()
    key: str = ""

    def cost_table(self) -> list[Candidate]:
        """Return the candidates, best first."""
        costs = self.costs() if callable(self.costs) else self.costs
        return msgspec.convert(costs, list[Candidate], from_attributes=True)


class EndedStory(msgspec.Struct, array_like=True, gc=False):
    """A story as it is sent. `client_id`: the id that the client sees. `read_us`: the body was
    read. `admitting_us`: the prompt was encoded; None: it never was. `waited_for`: what the request
    waited for before that or in admission, behind `ahead` others. `gap_us`: the longest pause
    between two texts. `stalled_us`: the client did not read. `prompt_mark`, `salt_mark`: equal for
    equal beginnings of prompts, and for equal salts and adapters. `slo`: how the request met its
    objective (`telemetry.slo`). `parent_id`, `trace_flags`, `trace_state`: what the client said of
    its trace; None: nothing. `options`: those that spans tell, as values of
    `operations.observer.spans.REQUEST_ATTRIBUTES` once it is sent."""

    request_id: str
    client_id: str
    trace: str
    path: str
    model: str
    end: str
    wall_s: float
    read_us: Microseconds
    limit_us: Microseconds
    admitting_us: Microseconds | None
    first_us: Microseconds | None
    ended_us: Microseconds
    gap_us: Microseconds
    stalled_us: Microseconds
    waited_for: str
    ahead: int
    priority: int
    choices: int
    prompts: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    prompt_mark: int
    salt_mark: int
    attempts: Sequence[AttemptFacts] = ()
    slo: int = 0
    parent_id: str = ""
    trace_flags: int | None = None
    trace_state: str = ""
    options: Any = None


class StoryAttempt(Protocol):
    """An attempt of a request at a worker: `scheduling.router.attempt.Attempt`."""

    placed: Any

    def facts(self, began_s: float) -> AttemptFacts:
        """Return the facts of an attempt that has ended."""


class Story(msgspec.Struct):
    """The facts of an HTTP request, while it is served. Times with `_s` are seconds of the
    process's clock.

    `headers` are the client's. `options` are `NO_OPTIONS` unless it asks for text. `attempts` are
    in the order in which they were made, one for each attempt of each choice. Token counts are sums
    over `prompts` and their `choices`. `limit_s` was waited for a place of the model. `admitted`:
    the prompt, which was encoded at `admitting_s`. `end` is "" for a whole answer, else an error
    code or "cancelled". `ended`: set at the end, for listeners.
    """

    request_id: str
    client_id: str
    path: str
    model: str
    began_s: float
    read_s: float
    headers: Mapping[bytes, bytes]
    options: TextOptions
    streaming: bool
    prompts: int
    trace: TraceContext | None = None
    attempts: list[StoryAttempt] = []
    limit_s: float = 0.0
    admitting_s: float | None = None
    waited_for: str = ""
    ahead: int = 0
    admitted: GenerateRequest | None = None
    first_s: float | None = None
    ended_s: float = 0.0
    gap_s: float = 0.0
    stalled_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    end: str = ""
    ended: EndedStory | None = None

    def close(self, wall_offset_s: float) -> EndedStory:
        """Return the story as it is sent. The attempts can go then."""
        options, request, prompt_mark, salt_mark = self.options, self.admitted, 0, 0
        if request is not None:
            prompt_mark = crc32(request.token_ids[:FINGERPRINT_BYTES])
            if request.salt or request.adapter:
                salt_mark = crc32(f"{request.salt}\0{request.adapter}".encode())
        began_s, admitting_s, first_s = self.began_s, self.admitting_s, self.first_s
        attempts = []
        for attempt in self.attempts:  # a comprehension is a call in CPython 3.11
            attempts.append(attempt.facts(began_s))  # noqa: PERF401
        self.ended = ended = EndedStory(
            self.request_id,
            self.client_id,
            "",
            self.path,
            self.model,
            self.end,
            began_s + wall_offset_s,
            (self.read_s - began_s) * US_PER_S,
            self.limit_s * US_PER_S,
            None if admitting_s is None else (admitting_s - began_s) * US_PER_S,
            None if first_s is None else (first_s - began_s) * US_PER_S,
            (self.ended_s - began_s) * US_PER_S,
            self.gap_s * US_PER_S,
            self.stalled_s * US_PER_S,
            self.waited_for,
            self.ahead,
            options.priority,
            options.n,
            self.prompts,
            self.prompt_tokens,
            self.cached_tokens,
            self.output_tokens,
            prompt_mark,
            salt_mark,
            tuple(attempts),
        )
        if (trace := self.trace) is not None:
            ended.trace, ended.parent_id = trace.trace_id, trace.parent_id
            ended.trace_flags, ended.trace_state = trace.flags, trace.state
        return ended


class ProcessSample(msgspec.Struct, array_like=True):
    """The knowledge of a process that routes, at one time. `waiting`: requests held in the router.
    `sent`: its requests by worker. `views`: how the cache of each worker is known."""

    waiting: int = 0
    sent: dict[str, int] = {}
    views: dict[str, str] = {}


class RouterChoice(msgspec.Struct, array_like=True):
    """A choice of a router process, which joins the story of a frontend. `attempt`: its facts so
    far."""

    request_id: str
    wall_s: float
    attempt: AttemptFacts


class StoryBatch(msgspec.Struct, array_like=True):
    """The event that a process publishes once a second. `dropped`: stories of good requests that
    were left out because there were too many. `pauses`: those of its event loop, (Unix time of the
    end, seconds). `planes`: why planes are away. `slo`: `SloCounts` of all requests of the process
    by model."""

    process: str
    wall_s: float
    stories: list[EndedStory] = []
    choices: list[RouterChoice] = []
    dropped: int = 0
    pauses: list[tuple[float, float]] = []
    planes: dict[str, str] = {}
    sample: ProcessSample | None = None
    slo: dict[str, tuple[int, ...]] = {}


STORIES_SUBJECT = "stories"
STORY_TIMES = tuple(name for name in EndedStory.__struct_fields__ if name.endswith("_us"))
ATTEMPT_TIMES = tuple(name for name in AttemptFacts.__struct_fields__ if name.endswith("_us"))
encode_batch = msgspec.msgpack.Encoder().encode
encode_story_into = msgspec.msgpack.Encoder().encode_into
_decode = msgspec.msgpack.Decoder(StoryBatch).decode


def decode_batch(payload: bytes) -> StoryBatch:
    """Return a batch with times in whole microseconds. Raises `msgspec.ValidationError`."""
    batch = _decode(payload)
    try:
        for choice in batch.choices:
            _round_times(choice.attempt, ATTEMPT_TIMES)
        for story in batch.stories:
            _round_times(story, STORY_TIMES)
            for attempt in story.attempts:
                _round_times(attempt, ATTEMPT_TIMES)
    except (ValueError, OverflowError) as error:  # infinity, or no number
        raise msgspec.ValidationError(str(error)) from error
    return batch


def _round_times(facts: EndedStory | AttemptFacts, names: Sequence[str]) -> None:
    for name in names:
        if (us := getattr(facts, name)) is not None:
            setattr(facts, name, int(us))


StoryListener = Callable[[Sequence[Story]], None]
"""Receives stories that have ended. Runs on the event loop and must be short."""

current_story: ContextVar[Story | None] = ContextVar("current_story", default=None)
"""The story of the request that the current task handles; None where no story is told."""
