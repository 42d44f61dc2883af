"""The values that the planner sees, proposes and decides, so that any clock drives it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from dynamo.core.timing.model import Timing

Role = Literal["both", "prefill", "decode"]


class KindState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The workers of one kind, which is an opaque name. `wanted` is the number that is ordered now.
    Workers that start or drain hold their `gpus`; None: nobody knows how many a worker has.

    `failing` says why no further worker can be expected to serve. `start_s` is how long a start
    takes, 0: unknown. Workers of one `pool` can take each other's role; "": they cannot.
    """

    wanted: int
    ready: int = 0
    starting: int = 0
    draining: int = 0
    failing: str = ""
    start_s: float = 0.0
    gpus: int | None = 1
    role: Role = "both"
    model: str = ""
    pool: str = ""

    @property
    def held(self) -> int:
        """The workers that hold GPUs, or that are ordered and soon do."""
        return max(self.wanted, self.ready + self.starting) + self.draining


class Promise(msgspec.Struct, frozen=True):
    """The latencies to keep: the time to the first token, and the mean one between tokens."""

    ttft_s: float = math.inf
    itl_ms: float = math.inf


class EngineLimits(msgspec.Struct, frozen=True):
    """The most that a worker computes at once: sequences, tokens of KV, and tokens of a step."""

    max_seqs: int = 256
    kv_tokens: int = 1 << 20
    step_tokens: int = 8192


class Demand(msgspec.Struct, frozen=True, omit_defaults=True):
    """The arrivals for a model in the last `seconds`, and what is there now.

    `requests` are arrivals, rejected ones too. `prompt_tokens` are those to compute of them: cached
    ones are taken off. `output_tokens` are those of the `ended` requests. `queued_tokens`: prompt
    tokens that wait. `running`: sequences that decode. `waiting`: requests without a worker.
    """

    seconds: float
    requests: int = 0
    prompt_tokens: float = 0.0
    ended: int = 0
    output_tokens: float = 0.0
    queued_tokens: float = 0.0
    running: int = 0
    waiting: int = 0
    timing: Timing | None = None
    limits: EngineLimits = EngineLimits()

    @property
    def fault(self) -> str:
        """Why these figures cannot be used, or ""."""
        numbers = (
            self.seconds, self.requests, self.prompt_tokens, self.ended, self.output_tokens,
            self.queued_tokens, self.running, self.waiting,
        )  # fmt: skip
        if not all(0 <= number < math.inf for number in numbers):
            return "its figures are negative or not finite"
        return "" if self.seconds else "its figures span no time"


class Observation(msgspec.Struct, frozen=True, omit_defaults=True):
    """All kinds, and the demand of each model. A model without figures is missing, and `stale` says
    why."""

    now_s: float
    kinds: Mapping[str, KindState]
    demands: Mapping[str, Demand] = {}
    stale: str = ""


class Sample(msgspec.Struct, frozen=True):
    """The findings of a policy for a model at an earlier decision."""

    now_s: float
    facts: Mapping[str, float]
    wanted: Mapping[str, int]


class Scene(msgspec.Struct, frozen=True):
    """Everything that a policy sees: the kinds and the demand of one model, the past oldest first,
    and the GPUs that all kinds may hold (None: no limit)."""

    now_s: float
    kinds: Mapping[str, KindState]
    demand: Demand
    promise: Promise
    past: Sequence[Sample] = ()
    budget: int | None = None


class Proposal(msgspec.Struct, frozen=True):
    """The sizes that a policy wants, why, and the figures that it wants to see again. `notes` are
    what an operator should know, such as a promise that no size keeps."""

    wanted: Mapping[str, int]
    why: str
    facts: Mapping[str, float] = {}
    notes: Sequence[str] = ()


class Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """Have `count` workers of a kind. An order carried out twice changes nothing. The workers that
    `takes_from` has too many of take the role of this kind, instead of new ones starting."""

    number: int
    kind: str
    count: int
    why: str
    takes_from: str = ""


class ScaleDecision(msgspec.Struct, frozen=True, omit_defaults=True):
    """A decision and what led to it: the sizes of the kinds, what each policy proposed, the rails
    that bound, and the orders. `outcome` tells what came of earlier orders. `source` names what was
    planned: a deployment that is started again has another one."""

    number: int
    now_s: float
    kinds: Mapping[str, KindState]
    proposed: Mapping[str, Sample] = {}
    why: Mapping[str, str] = {}
    bound: Mapping[str, str] = {}
    notes: Sequence[str] = ()
    orders: Sequence[Order] = ()
    outcome: Sequence[str] = ()
    source: str = ""
