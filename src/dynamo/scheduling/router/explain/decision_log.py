"""The last routing decisions, kept for explanations."""

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
"""The suffix that a frontend appends to a client's id: a counter, then the prompt's index."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """A decision in a readable form.

    - `at`: Unix time. `router`: name of the process that chose.
    - `prefill`: the worker that computes the prompt, if another one.
    - `harm_weight`: the price of a pause for answers, if it is steered by the target `itl_slo_ms`.
    - `costs`: candidates with every term of their cost, best first.
    - `outcome`: None while the worker still answers. `why`: a sentence.
    """

    request_id: str
    choice: int
    model: str
    at: float
    router: str
    worker: str
    prefill: str = ""
    mode: str
    view: str
    candidates: int
    waited_ms: float
    prompt_blocks: int
    overlap_blocks: int
    best_overlap_blocks: int
    predicted_ttft_ms: float | None
    harm_weight: float | None = None
    itl_slo_ms: float = 0.0
    costs: tuple[Candidate, ...]
    outcome: Outcome | None
    why: str


_SHARED_FIELDS = (
    *("mode", "view", "candidates", "prompt_blocks", "overlap_blocks", "best_overlap_blocks"),
    *("harm_weight", "itl_slo_ms"),
)


class DecisionEntry:
    """A logged decision; the explanation is built on request only."""

    __slots__ = ("at", "choice", "decision", "model", "outcome", "request_id")

    def __init__(self, request: GenerateRequest, decision: Decision, at: float) -> None:
        self.request_id = request.request_id
        self.choice = request.choice
        self.model = request.model
        self.at = at
        self.decision = decision
        self.outcome: Outcome | None = None

    def set_outcome(self, outcome: Outcome) -> None:
        """Set the outcome and drop the prompt."""
        self.decision = replace(self.decision, placement=None, prompt=None)
        self.outcome = outcome

    def explain(self, router: str) -> Explanation:
        """Return the explanation; `router` is the name of this process."""
        decision = self.decision
        predicted_s = decision.predicted_ttft_s
        return Explanation(
            request_id=self.request_id,
            choice=self.choice,
            model=self.model,
            at=self.at,
            router=router,
            worker=decision.worker,
            prefill=decision.prefill_worker,
            waited_ms=decision.waited_s * 1e3,
            predicted_ttft_ms=None if predicted_s is None else predicted_s * 1e3,
            costs=tuple(decision.cost_table()),
            outcome=self.outcome,
            why=describe_decision(decision),
            **{name: getattr(decision, name) for name in _SHARED_FIELDS},
        )


class DecisionLog:
    """The last `max_entries` decisions of this process, one for each attempt of each choice."""

    def __init__(self, clock: Clock, router: str = "", max_entries: int = MAX_DECISIONS) -> None:
        self._clock = clock
        self._router = router
        self._entries: deque[DecisionEntry] = deque(maxlen=max_entries)

    def add(self, request: GenerateRequest, decision: Decision) -> DecisionEntry:
        """Add a decision; the caller sets the entry's outcome later."""
        entry = DecisionEntry(request, decision, self._clock.wall())
        self._entries.append(entry)
        return entry

    def find(self, request_id: str) -> list[Explanation]:
        """Return all kept decisions for a request, in order. A client's own id finds the last
        request with that id."""
        entries = [entry for entry in self._entries if entry.request_id == request_id]
        entries = entries or self._find_by_client_id(request_id)
        return [entry.explain(self._router) for entry in entries]

    def latest(self, count: int) -> list[Explanation]:
        """Return the last `count` decisions, newest first."""
        return [entry.explain(self._router) for entry in islice(reversed(self._entries), count)]

    def _find_by_client_id(self, client_id: str) -> list[DecisionEntry]:
        newest_first = (
            (http_request_id(entry.request_id, client_id), entry)
            for entry in reversed(self._entries)
        )
        matches = [(http_id, entry) for http_id, entry in newest_first if http_id]
        return [entry for http_id, entry in reversed(matches) if http_id == matches[0][0]]


def http_request_id(request_id: str, client_id: str) -> str:
    """Return the unique id of the HTTP request that `request_id` belongs to, if a client sent it
    with the id `client_id`; else ""."""
    if not (request_id.startswith(client_id) and _SUFFIX.fullmatch(request_id, len(client_id))):
        return ""
    return client_id + request_id[len(client_id) :].split(".", maxsplit=1)[0]


def describe_decision(decision: Decision) -> str:
    """Return a decision as a sentence."""
    worker, table = decision.worker, decision.cost_table()
    prefill = decision.prefill_worker
    candidates = f"of {decision.candidates} worker" + ("s" if decision.candidates != 1 else "")
    if not table:
        pair = f", and {prefill} for its prompt" if prefill else ""
        return f"{decision.mode} chose {worker} {candidates}{pair}, without cache or cost data"
    parts = [f"{worker} {candidates}"]
    if prefill:
        parts.append(f"its prompt computed by {prefill}")
    # A row of a pair's table is the worker that computes the prompt.
    chosen = next((row for row in table if row.worker == (prefill or worker)), None)
    if chosen is not None:
        parts.append(f"cost {chosen.cost:.4g}")
        others = [row for row in table if row is not chosen]
        if others:
            parts.append(f"the next best {others[0].worker} {others[0].cost:.4g}")
    if decision.view == NO_PREFIX_CACHE:
        parts.append("it has no prefix cache")
    elif decision.prompt_blocks:
        held, total = decision.overlap_blocks, decision.prompt_blocks
        parts.append(f"it holds {held} of the prompt's {total} blocks")
        if chosen is not None and chosen.tier_blocks:
            tiers = (f"{count} in tier {tier}" for tier, count in chosen.tier_blocks.items())
            parts.append(f"of these {' and '.join(tiers)}")
        if decision.best_overlap_blocks > held:
            parts.append(f"another holds {decision.best_overlap_blocks}")
    if decision.waited_s >= MIN_SHOWN_WAIT_S:
        parts.append(f"after {decision.waited_s * 1e3:.0f} ms in the router")
    if decision.view and decision.view not in {"exact", NO_PREFIX_CACHE}:
        parts.append(f"its cache is known only as {decision.view}")
    return ", ".join(parts)
