"""Messages between the request pipeline and engines.

Token ids are packed as little-endian u32, 4 bytes a token (`array('I')`, `numpy.uint32`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from msgspec.structs import astuple

from dynamo.core.shared_payload import SharedPayload

FinishReason = Literal["stop", "length", "cancelled"]


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling of the next token. `temperature` 0 is greedy; `top_k` 0 means no limit."""

    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 50
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logit_bias: dict[int, float] = {}


class StopConditions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Conditions under which an engine ends an answer. The detokeniser handles stop strings."""

    max_tokens: int = 1024
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class RequestGroup:
    """The common part of the choices of one prompt, within a process.

    Choices differ from `base` in request id, choice, rank, priority and prefill only. The other
    attributes are computed for the first choice that needs them: the encoded base by dispatch, the
    block hashes by the router, the prompt's content by the engine.
    """

    __slots__ = ("base", "engine_prompt", "routing_prompt", "shared_payload")

    def __init__(self, base: GenerateRequest) -> None:
        self.base = base
        self.shared_payload: SharedPayload | None = None
        self.routing_prompt: Any = None
        self.engine_prompt: Any = None

    def covers(self, request: GenerateRequest) -> bool:
        """Whether `request` is still a choice of the base. A stage may have changed it."""
        base = self.base
        return (
            request.token_ids is base.token_ids
            and request.stops == base.stops
            and request.sampling == base.sampling
            and request.salt == base.salt
            and request.model == base.model
            and request.resumed == base.resumed
            and request.top_logprobs == base.top_logprobs
        )


class GenerateRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A single choice of a request, in tokens.

    - `resumed`: how many of the last `token_ids` an earlier attempt generated. Sampling and
      penalties count output positions from there. `stops` counts only tokens still to generate.
    - `top_logprobs`: None = no logprobs, 0 = only those of the chosen tokens.
    - `rank`: the data-parallel rank of the worker that the router chose.
    - `prefill`: id of the instance that computes the prompt. Empty: the worker itself does.
    - `group`: the other choices of the same prompt. None on the wire and for a single choice.
    """

    request_id: str
    model: str
    token_ids: bytes
    sampling: SamplingParams
    stops: StopConditions
    choice: int = 0
    resumed: int = 0
    top_logprobs: int | None = None
    salt: str = ""
    priority: int = 0
    rank: int | None = None
    group: RequestGroup | None = None
    prefill: str = ""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities of one position. `top` holds (id, logprob), best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Started(msgspec.Struct, frozen=True, omit_defaults=True):
    """An engine began the request. `cached_tokens`: prompt tokens from its KV cache. `prefill`: the
    worker that the router chose for the prompt, if another one."""

    worker: str = ""
    cached_tokens: int = 0
    prompt_tokens: int = 0
    prefill: str = ""


class Finish(msgspec.Struct, frozen=True, omit_defaults=True):
    """The end of an answer. `stop_token`: the id that ended it, which is not sent as a token.

    `completion_tokens` counts the stop token, too, because the engine has generated it.
    """

    reason: FinishReason
    completion_tokens: int = 0
    stop_token: int | None = None


BOTH_ROLES = ("prefill", "decode")
"""The roles of a worker that computes prompts and answers."""
ROLES_BY_NAME = {"both": BOTH_ROLES, "prefill": ("prefill",), "decode": ("decode",)}
"""The roles that a worker can have, by the name of `engine.role`."""


def worker_role(name: str) -> str:
    """Return the role of a worker's process, as `dynamo ps` shows it, for an `engine.role`."""
    return "worker" if name == "both" else f"{name}_worker"


class EngineInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Properties of an engine that are fixed after its start.

    `data_parallel` is the number of ranks. Ranks share `num_blocks` and `max_num_seqs` equally, and
    each computes its own steps. `roles`: a worker without decode only computes prompts for others,
    a worker without prefill only its own. `prefix_caching`: prompts reuse the blocks of other
    prompts.
    """

    engine: str
    block_tokens: int
    num_blocks: int
    context_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int = 0
    roles: tuple[str, ...] = BOTH_ROLES
    data_parallel: int = 1
    prefix_caching: bool = True


class Load(msgspec.Struct, frozen=True, omit_defaults=True):
    """The present load of an engine. `prefill_tokens`: prompt tokens still to compute.

    `cached_blocks`: blocks with a content hash, in use or not. `arriving`: how many of `running`
    wait for KV blocks from another worker. `ranks`: the load of each of several data-parallel
    ranks.
    """

    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    active_blocks: int = 0
    total_blocks: int = 0
    steps: int = 0
    cached_blocks: int = 0
    arriving: int = 0
    ranks: tuple[Load, ...] = ()


def sum_loads(loads: Iterable[Load]) -> Load:
    """Return the sum of all counts, without `ranks`."""
    counts: list[Any] = [*map(sum, zip(*(astuple(load)[:-1] for load in loads), strict=True))]
    return Load(*counts)


Tier = Literal["device", "host", "disk", "shared"]
"""Place of a block: accelerator memory, host memory, local disk, or a store shared by all hosts."""


class ProbeResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker's answer to a probe: steps computed so far and requests in its engine.

    An idle worker computes one token before it answers.
    """

    steps: int = 0
    requests: int = 0


class BlocksStored(msgspec.Struct, frozen=True, tag="stored", omit_defaults=True):
    """A chain of full blocks was stored. The first is a child of `parent` (0 = the root)."""

    parent: int
    hashes: tuple[int, ...]
    tier: Tier = "device"


class BlocksRemoved(msgspec.Struct, frozen=True, tag="removed", omit_defaults=True):
    """Blocks were removed from a tier."""

    hashes: tuple[int, ...]
    tier: Tier = "device"


class BlocksCleared(msgspec.Struct, frozen=True, tag="cleared"):
    """All blocks of all tiers were removed."""


KvEvent = BlocksStored | BlocksRemoved | BlocksCleared
