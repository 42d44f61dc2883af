"""Why a request went where it went: the last decisions, kept to be asked for."""

from __future__ import annotations

import re
from collections import deque
from itertools import islice

import msgspec
from msgspec.structs import replace

from dynamo.core.clock import Clock
from dynamo.core.values import GenerateRequest
from dynamo.scheduling.index.cache_view import NO_PREFIX_CACHE
from dynamo.scheduling.router.policy import Candidate, Decision, Outcome

MAX_DECISIONS = 1000
MIN_SHOWN_WAIT_S = 0.001
_SUFFIX = re.compile(r"[-.][0-9a-f]+(\.[0-9]+)?\Z")
"""What a frontend hangs on a client's id: a counter, then the prompt's place in the body."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """One decision, as people and programs read it. `at`: Unix time; `router`: the process that
    chose; `costs`: the table of candidates, best first, each with every term of its cost;
    `outcome`: None while the worker still answers; `why`: all of it in a sentence."""

    request_id: str
    choice: int
    model: str
    at: float
    router: str
    worker: str
    mode: str
    view: str
    candidates: int
    waited_ms: float
    prompt_blocks: int
    overlap_blocks: int
    best_overlap_blocks: int
    predicted_ttft_ms: float | None
    costs: tuple[Candidate, ...]
    outcome: Outcome | None
    why: str


class DecisionEntry:
    """A decision as it is kept: nobody may ever ask."""

    __slots__ = ("at", "choice", "decision", "model", "outcome", "request_id")

    def __init__(self, request: GenerateRequest, decision: Decision, at: float) -> None:
        self.request_id = request.request_id
        self.choice = request.choice
        self.model = request.model
        self.at = at
        self.decision = decision
        self.outcome: Outcome | None = None

    def set_outcome(self, outcome: Outcome) -> None:
        """What came of it."""
        self.decision = replace(self.decision, placement=None)  # it may hold a whole prompt
        self.outcome = outcome

    def explain(self, router: str) -> Explanation:
        """It, for whoever asks."""
        made = self.decision
        predicted_s = made.predicted_ttft_s
        return Explanation(
            request_id=self.request_id,
            choice=self.choice,
            model=self.model,
            at=self.at,
            router=router,
            worker=made.worker,
            mode=made.mode,
            view=made.view,
            candidates=made.candidates,
            waited_ms=made.waited_s * 1e3,
            prompt_blocks=made.prompt_blocks,
            overlap_blocks=made.overlap_blocks,
            best_overlap_blocks=made.best_overlap_blocks,
            predicted_ttft_ms=None if predicted_s is None else predicted_s * 1e3,
            costs=tuple(made.cost_table),
            outcome=self.outcome,
            why=describe_decision(made),
        )


class DecisionLog:
    """The last `kept` decisions of one process: of every choice and attempt of a request one."""

    def __init__(self, clock: Clock, router: str = "", max_entries: int = MAX_DECISIONS) -> None:
        self._clock = clock
        self._router = router
        self._entries: deque[DecisionEntry] = deque(maxlen=max_entries)

    def add(self, request: GenerateRequest, decision: Decision) -> DecisionEntry:
        """A worker was chosen; tell the entry how that ended."""
        entry = DecisionEntry(request, decision, self._clock.wall())
        self._entries.append(entry)
        return entry

    def find(self, request_id: str) -> list[Explanation]:
        """Every decision for a request, in order; empty where nothing is known (any more). A
        client's own id finds the last request that bore it."""
        entries = [one for one in self._entries if one.request_id == request_id]
        return [one.explain(self._router) for one in entries or self._find_by_client_id(request_id)]

    def latest(self, count: int) -> list[Explanation]:
        """The newest decisions, newest first."""
        return [one.explain(self._router) for one in islice(reversed(self._entries), count)]

    def _find_by_client_id(self, given: str) -> list[DecisionEntry]:
        named = ((http_request_id(one.request_id, given), one) for one in reversed(self._entries))
        found = [(own, one) for own, one in named if own]
        return [one for own, one in reversed(found) if own == found[0][0]]


def http_request_id(request_id: str, given: str) -> str:
    """The unique id of the HTTP request that `request_id` was a part of, if a client gave it the id
    `given`; "" if it did not."""
    if not (request_id.startswith(given) and _SUFFIX.fullmatch(request_id, len(given))):
        return ""
    return given + request_id[len(given) :].split(".", maxsplit=1)[0]


def describe_decision(made: Decision) -> str:
    """A decision in a sentence."""
    among = f"of {made.candidates} worker" + ("s" if made.candidates != 1 else "")
    if not made.cost_table:
        return f"{made.mode} took {made.worker} {among}, without a look at what workers hold"
    chosen = next((one for one in made.cost_table if one.worker == made.worker), None)
    parts = [f"{made.worker} {among}"]
    if chosen is not None:
        parts.append(f"cost {chosen.cost:.4g}")
        others = [one for one in made.cost_table if one is not chosen]
        if others:
            parts.append(f"the next best {others[0].worker} {others[0].cost:.4g}")
    if made.view == NO_PREFIX_CACHE:
        parts.append("it has no prefix cache")
    elif made.prompt_blocks:
        parts.append(f"it holds {made.overlap_blocks} of the prompt's {made.prompt_blocks} blocks")
        if made.best_overlap_blocks > made.overlap_blocks:
            parts.append(f"another holds {made.best_overlap_blocks}")
    if made.waited_s >= MIN_SHOWN_WAIT_S:
        parts.append(f"after {made.waited_s * 1e3:.0f} ms in the router")
    if made.view and made.view not in {"exact", NO_PREFIX_CACHE}:
        parts.append(f"its cache is known only as {made.view}")
    return ", ".join(parts)
