"""`KvSource`: a place that supplies KV blocks of a prompt which this engine has not computed.

A prefix cache is filled from sources. The scheduler allocates the blocks of a sequence and does not
schedule it while its source fills them (`Arrival`). When the source ends or fails, the sequence
runs on from what arrived, and the engine computes the rest.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import msgspec

from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, InternalError, TransferFailed
from dynamo.core.values import GenerateRequest, TokenLogprobs

log = logging.getLogger(__name__)


class ArrivalCounters(msgspec.Struct):
    """Totals of the arrivals of an engine.

    `blocks_arrived` were filled by sources; `blocks_saved` were in the engine's own cache when an
    arrival began. `moved` counts requests whose blocks came from the draining worker that they
    left. `wait_s` is the sum of the arrivals' durations. `fallbacks` counts failed sources by
    reason; the reason of requests that the router sends again is "sent again".
    """

    prompts: int = 0
    moved: int = 0
    wait_s: float = 0.0
    blocks_arrived: int = 0
    blocks_saved: int = 0
    fallbacks: Counter[str] = msgspec.field(default_factory=Counter)


def count_fallback(
    counters: ArrivalCounters, error: Exception, request_id: str, source: str
) -> None:
    """Count and log that a prompt, or its rest, is computed here because `source` failed."""
    reason = error.code if isinstance(error, DynamoError) else InternalError.code
    if isinstance(error, TransferFailed):
        reason = f"transfer {error.reason}"
    counters.fallbacks[reason] += 1
    fields = {"request": request_id, "from": source, "reason": reason, "error": str(error)}
    log.warning("KV did not arrive: the rest is computed here", extra={"fields": fields})


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """The first token of an answer, sampled by the worker that computed the prompt.
    `cached_tokens`: prompt tokens that the prefix cache of that worker supplied. `queue_s` and
    `prefill_s` are its times for the prompt, None from a worker that does not tell."""

    token: Annotated[int, msgspec.Meta(ge=0)]
    logprobs: TokenLogprobs | None = None
    cached_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    queue_s: float | None = None
    prefill_s: float | None = None


class Arrival(ABC):
    """A sequence whose blocks a source fills.

    - `first_block`: the number of leading blocks that this engine has in its own prefix cache.
    - `block_ids`: the blocks of the prompt from `first_block` on, with the partial last one. The
      arrival owns them until `KvSource.fill` has returned.
    - `prompt_tokens`: all tokens of the prompt; a full block holds `block_tokens` of them.
    """

    request: GenerateRequest
    context: Context
    prompt_tokens: int
    block_tokens: int
    first_block: int
    block_ids: Sequence[int]

    @property
    @abstractmethod
    def needs_blocks(self) -> bool:
        """Whether the sequence continues after the first token, so that its blocks are needed."""

    @property
    @abstractmethod
    def compute_s(self) -> float:
        """The predicted time in which this engine would compute the tokens that have not
        arrived."""

    @property
    @abstractmethod
    def missing_steps(self) -> int:
        """The steps in which this engine would compute the tokens that have not arrived."""

    @abstractmethod
    def on_arrived(self, tokens: int) -> None:
        """The KV of all positions before `tokens` is in the blocks and verified. `tokens` is the
        end of a block or of the prompt."""

    @abstractmethod
    def on_first_token(self, first: FirstToken) -> bool:
        """Deliver the first token at once. False: the answer has ended, and no block is needed."""

    @abstractmethod
    def fail(self, error: DynamoError) -> None:
        """End the request with `error`, instead of computing here what has not arrived."""


class KvSource(ABC):
    """Supplies the KV of a prompt, or a part of it. `counters`: where its arrivals are counted;
    None: among those of other workers. `name`: the tier, or "peer". `bytes_per_s`: learnt rate; 0:
    unknown. `loads`: the blocks of the sequence that come from tiers of this engine."""

    counters: ArrivalCounters | None = None
    name: str = "peer"
    bytes_per_s: float = 0.0
    loads: range = range(0)

    @abstractmethod
    async def fill(self, arrival: Arrival) -> None:
        """Fill the blocks of `arrival` from the front and report the progress to it.

        Returns when nothing more will come. Raises `TransferFailed` or another `DynamoError` if the
        source failed; what arrived before counts. After the return, the exception or a
        cancellation, nothing writes into the blocks any more. A source ends by its own deadline.
        """


class PrefillSink(ABC):
    """Receives the progress of a prompt that a prefill worker computes for another worker."""

    @abstractmethod
    def on_queued(self, tokens: int) -> None:
        """The engine has accepted the prompt, behind prompts of so many tokens."""

    @abstractmethod
    def on_blocks(self, first: int, block_ids: Sequence[int], generations: Sequence[int]) -> bool:
        """The blocks `first`, `first + 1`, ... of the prompt are in these slots of the region. The
        slots keep their content until the call ends. False: the caller is gone."""

    @abstractmethod
    def on_first_token(self, first: FirstToken) -> bool:
        """The prompt is computed: every block was reported, and this is the first token."""
