"""Replays of parts of a record with other settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.core.settings.keys import setting_specs_by_key
from dynamo.operations.planner.values import Promise
from dynamo.operations.replay.fast.replay import FastReplay
from dynamo.operations.replay.replay import Replay, ReplayPlan
from dynamo.operations.replay.trace import TraceConversation
from dynamo.operations.tuner.outcome import SettingOutcome, replay_outcome
from dynamo.operations.tuner.search import Play, Values

SHORT_S, LONG_S = 600.0, 3600.0
FEWEST = 50
MOST_SHORT, MOST_LONG, MOST_EXACT = 6_000, 40_000, 4_000
"""Conversations of a replay."""

MakePlan = Callable[[Mapping[str, Any]], ReplayPlan]
"""Returns the plan of a replay with these settings."""


def tuned_ranges(settings: Settings) -> Mapping[str, Sequence[Any]]:
    """Return the values to try of each setting that has an effect here, by key."""
    keyed = {key: spec.meta.tuned for key, spec in setting_specs_by_key().items()}
    ranges = {key: tried for key, tried in keyed.items() if tried}
    if settings.router.mode != "kv":
        ranges.pop("router.policy")
    return ranges


def make_stages(
    conversations: Sequence[TraceConversation], make_plan: MakePlan, promise: Promise
) -> Sequence[Play]:
    """Return the stages of a search: some minutes of the record, an hour of it, and the exact
    replay of minutes. Each part is the busiest of the record. Raises `ConfigError` if that is too
    short to tell settings apart."""
    requests = sum(len(each.requests) for each in conversations)
    if requests < FEWEST:
        raise ConfigError(
            f"the record has {requests} requests; a search needs {FEWEST}",
            hint="tune later, or name a longer trace",
        )
    short = busiest(conversations, SHORT_S)[:MOST_SHORT]
    long = busiest(conversations, LONG_S)[:MOST_LONG]
    parts = [short, long] if len(long) > len(short) else [short]
    stages = [_stage(part, make_plan, promise, exact=False) for part in parts]
    return [*stages, _stage(short[:MOST_EXACT], make_plan, promise, exact=True)]


def _stage(
    part: Sequence[TraceConversation], make_plan: MakePlan, promise: Promise, *, exact: bool
) -> Play:
    def play(values: Values) -> SettingOutcome:
        plan = make_plan(dict(values))
        replay = Replay if exact and not plan.workers.lockstep else FastReplay
        return replay_outcome(*replay(plan).run(part), promise)

    return play


def busiest(conversations: Sequence[TraceConversation], span_s: float) -> list[TraceConversation]:
    """Return the conversations of the `span_s` in which most tokens arrive, from 0 on."""
    first = tokens = most = 0
    ends = (0, 0)
    for last, each in enumerate(conversations, 1):
        tokens += _tokens(each)
        while each.start_s - conversations[first].start_s >= span_s:
            tokens -= _tokens(conversations[first])
            first += 1
        if tokens > most:
            most, ends = tokens, (first, last)
    part = conversations[slice(*ends)]
    return [replace(each, start_s=each.start_s - part[0].start_s) for each in part]


def _tokens(conversation: TraceConversation) -> int:
    return sum(each.prompt_tokens + each.output_tokens for each in conversation.requests)
