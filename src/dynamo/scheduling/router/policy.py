"""How an instance is chosen: the interface, and the modes that know nothing of what a worker
holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import msgspec

from dynamo.core.context import Context
from dynamo.core.errors import NoWorkers
from dynamo.core.kv_events import worker_name
from dynamo.core.values import GenerateRequest
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.calls.load_balancing import canonical_mode
from dynamo.scheduling.router.labels import excluded_workers


def no_workers_error(client: Client) -> NoWorkers:
    """The error of having no worker to choose, and why."""
    return client.no_workers_error("worker", "this model")


class Placement:
    """The life of one placed request, as its policy follows it. The router drives it; how many
    tokens were `emitted` is read off where they are kept, so that a token costs nothing."""

    __slots__ = ("_offset", "_token_log")

    def __init__(self) -> None:
        self._offset = 0
        self._token_log: Sequence[int] = ()

    @property
    def emitted(self) -> int:
        """Tokens, until now."""
        return self._offset + len(self._token_log)

    @emitted.setter
    def emitted(self, count: int) -> None:
        self._offset = count - len(self._token_log)

    def attach_token_log(self, kept: Sequence[int]) -> None:
        """From now on all tokens of the request are appended to `kept`."""
        self._offset, self._token_log = self.emitted - len(kept), kept

    def on_first_token(self) -> None:
        """Called once, before the first tokens are counted."""

    def end(self) -> None:
        """Called once, however the request ended."""


class Candidate(msgspec.Struct, frozen=True):
    """One worker that could have been chosen. `cost`: the lowest wins; `terms`: what it is the sum
    of, by name, in the policy's unit (milliseconds for predicted times)."""

    worker: str
    overlap_blocks: int
    cost: float
    terms: dict[str, float]


class Decision(msgspec.Struct, frozen=True):
    """One choice. `candidates`: how many instances it was made among; `table`: the best of them,
    best first, as they were when the choice fell; `overlap_blocks`: leading blocks of the prompt
    that the instance is expected to hold; `waited_s`: in the router, for a better moment; `view`:
    how well the instance's cache is known (exact, stale, approximate; "" = not looked at); `rank`:
    the data-parallel rank that was chosen, of an instance that has several; `waiting`: how many
    requests the choice left in the router."""

    instance: Instance
    mode: str
    candidates: int
    cost_table: Sequence[Candidate] = ()
    overlap_blocks: int = 0
    prompt_blocks: int = 0
    best_overlap_blocks: int = 0
    predicted_ttft_s: float | None = None
    waited_s: float = 0.0
    view: str = ""
    placement: Placement | None = None
    rank: int | None = None
    queue_length: int = 0

    @property
    def worker(self) -> str:
        """The instance, or the rank of it, by the name that its books have."""
        return worker_name(self.instance.id, self.rank)


class Outcome(msgspec.Struct, frozen=True):
    """What came of a decision. `ttft_s`: from the router to the first token (None = none came);
    `error`: the code of what it ended with ("" = well, or the reader had enough)."""

    ttft_s: float | None
    duration_s: float
    cached_tokens: int
    prompt_tokens: int
    output_tokens: int
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether the answer came to its end."""
        return not self.error


class Observer(ABC):
    """Hears of every decision and what came of it. On the loop: be quick."""

    @abstractmethod
    def on_decision(self, request: GenerateRequest, decision: Decision) -> None:
        """A worker was chosen; the request goes there now."""

    @abstractmethod
    def on_outcome(self, request: GenerateRequest, decision: Decision, outcome: Outcome) -> None:
        """The request left that worker."""


class Policy(ABC):
    """Chooses; asynchronous, because a policy may let a request wait for a better moment."""

    @abstractmethod
    async def choose(
        self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
    ) -> Decision:
        """One instance that is not in `tried` (ids). Raises `NoWorkers`."""

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release what it holds; requests that still wait fail with `NoWorkers`."""


class BasicPolicy(Policy):
    """The LLM-free picks of the runtime's client."""

    def __init__(self, client: Client, mode: str) -> None:
        """`mode` as settings have it, `-` and `_` alike. Raises ConfigError for another."""
        self._client = client
        self._mode = canonical_mode(mode)

    async def choose(
        self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
    ) -> Decision:
        del request
        live = self._client.instances
        if live and not tried and not context.metadata:
            return Decision(self._client.pick(self._mode), self._mode, len(live))
        allowed = live.keys() - tried - excluded_workers(live, context)
        if not allowed:
            raise no_workers_error(self._client)
        return Decision(self._client.pick(self._mode, allowed), self._mode, len(allowed))
