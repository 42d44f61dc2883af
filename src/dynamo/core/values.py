"""Messages between the request pipeline and engines.

Token ids are packed as little-endian u32, 4 bytes a token (`array('I')`, `numpy.uint32`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import astuple, replace

from dynamo.core.shared_payload import SharedPayload
from dynamo.core.timing.worker_times import WorkerTimes

FinishReason = Literal["stop", "length", "cancelled", "content_filter"]


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling of the next token. `temperature` 0 is greedy; `top_k` 0 means no limit.

    `random_seed`: no client has asked for `seed`. Engines whose seeded requests cost more, such as
    vLLM's, ignore it then.
    """

    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 50
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logit_bias: dict[int, float] = {}
    random_seed: bool = False


class StopConditions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Conditions under which an engine ends an answer. The detokeniser handles stop strings."""

    max_tokens: int = 1024
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


StructureKind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "calls", "text"]


class StructuredOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """The structured output that an answer must have.

    - `value`: a JSON schema, a regular expression, a JSON list of texts to choose from, or an EBNF
      grammar; "" for any JSON object and for any text. Grammars of calls are in the syntax of
      llguidance (Lark).
    - `whitespace_pattern`: the white space between parts of JSON; "": the engine's own.
    - `reasoning_end`: ids behind which the output begins, in u32. `reasoning_start`: the id with
      which an answer may begin to reason; "": the answer begins inside of reasoning, if it has an
      end.
    - `reasoning_limit`: after so many tokens of reasoning its end is forced, which then is one
      token; None: never. `soft_limit`: engines that cannot force it answer without the limit.
    - `optional`: engines that cannot enforce the output answer without it.
    """

    kind: StructureKind
    value: str = ""
    whitespace_pattern: str = ""
    reasoning_start: bytes = b""
    reasoning_end: bytes = b""
    reasoning_limit: int | None = None
    soft_limit: bool = False
    optional: bool = False

    def supported_by(
        self, features: Container[str], *, resumed: bool = False
    ) -> StructuredOutput | None:
        """Return the structured output without what engines with these `features` may leave out;
        None where nothing remains. `resumed`: another attempt has begun the answer."""
        output = self
        optional = ("calls", "resumed_form") if resumed else ("calls",)
        if output.soft_limit and "thinking_budget" not in features:
            output = replace(output, reasoning_limit=None)
        if output.optional and not all(feature in features for feature in optional):
            output = StructuredOutput("text", reasoning_limit=output.reasoning_limit)
        return None if output.kind == "text" and output.reasoning_limit is None else output


class TextParameters(msgspec.Struct, frozen=True, omit_defaults=True):
    """The caller's parameters of a request in text, by OpenAI's names. `chat`: a conversation, not
    a prompt."""

    chat: bool
    values: dict[str, Any] = {}


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
            and request.prompt_logprobs == base.prompt_logprobs
            and request.adapter == base.adapter
            and request.structured == base.structured
            and request.kv == base.kv
            and request.extra == base.extra
            and request.text is base.text
        )


class GenerateRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A single choice of a request, in tokens.

    - `resumed`: how many of the last `token_ids` an earlier attempt generated. Sampling and
      penalties count output positions from there. `stops` counts only tokens still to generate.
    - `top_logprobs`: None = no logprobs, 0 = only those of the chosen tokens.
    - `prompt_logprobs`: how many logprobs of each prompt token come with `Finish`; None: none. Such
      a prompt is computed in full, because cached tokens have no logits.
    - `rank`: the data-parallel rank of the worker that the router chose.
    - `prefill`: name of the worker that computes the prompt. Empty: the worker itself does.
    - `kv_from`: name of the draining worker that wrote the last `resumed` tokens, and has the KV of
      all tokens in its cache. Empty: no such worker.
    - `itl_slo_ms`: the gap between tokens above which the worker counts a gap as slow; 0: it does
      not count.
    - `group`: the other choices of the same prompt. None on the wire and for a single choice.
    - `adapter`: a key of `EngineInfo.adapters`, "" for the model itself.
    - `structured`: the structured output, None for any text.
    - `kv`: what `Finish.kv` of another engine said, which holds the KV of the prompt. Opaque.
    - `extra`: parameters of the engine itself, by its names.
    - `text`: set for a model without a tokenizer. Then `token_ids` is the conversation or the
      prompt as JSON in UTF-8, filled up with spaces, and 4 bytes of it count as a token.
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
    kv_from: str = ""
    itl_slo_ms: float = 0.0
    adapter: str = ""
    structured: StructuredOutput | None = None
    kv: bytes = b""
    extra: dict[str, Any] = {}
    text: TextParameters | None = None
    prompt_logprobs: int | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities of one position. `top` holds (id, logprob), best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PromptTokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The natural-log probability of a prompt token after those before it. `rank`: 1 for the most
    probable token. `top` holds (id, logprob), best first."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Started(msgspec.Struct, frozen=True, omit_defaults=True):
    """An engine began the request. `cached_tokens`: prompt tokens from its KV cache, 0 if it does
    not know them yet. `prefill`: the worker that the router chose for the prompt, if another one.
    `times`: those until here, as far as the engine tells.
    """

    worker: str = ""
    cached_tokens: int = 0
    prompt_tokens: int = 0
    prefill: str = ""
    times: WorkerTimes | None = None


class Finish(msgspec.Struct, frozen=True, omit_defaults=True):
    """The end of an answer. `stop_token`: the id that ended it, which is not sent as a token.

    `completion_tokens` counts the stop token, too, because the engine has generated it. `kv`: the
    hand-over of the KV to the engine that continues, in the engine's own format; "" for none.
    `cached_tokens`: reported here by an engine that did not know them for `Started`. `stop_string`:
    the text that ended an answer in text; `prompt_tokens`, `reasoning_tokens`: its counts.
    `prompt_logprobs`: those of the second prompt token and on, where the request wants them.
    `times`: all times of the attempt, as far as the engine tells.
    """

    reason: FinishReason
    completion_tokens: int = 0
    stop_token: int | None = None
    kv: bytes = b""
    cached_tokens: int | None = None
    stop_string: str = ""
    prompt_tokens: int = 0
    reasoning_tokens: int = 0
    prompt_logprobs: tuple[PromptTokenLogprob, ...] = ()
    times: WorkerTimes | None = None


BOTH_ROLES = ("prefill", "decode")
"""The roles of a worker that computes prompts and answers."""
ROLES_BY_NAME = {"both": BOTH_ROLES, "prefill": ("prefill",), "decode": ("decode",)}
"""The roles that a worker can have, by the name of `engine.role`."""


def worker_role(name: str) -> str:
    """Return the role of a worker's process, as `dynamo ps` shows it, for an `engine.role`."""
    return "worker" if name == "both" else f"{name}_worker"


Feature = Literal[
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
    "structured",
    "thinking_budget",
    "whitespace",
    "form_after_reasoning",
    "calls",
    "resumed_form",
    "adapters",
    "extra",
    "text",
]
"""A property of an engine that a request may need. "whitespace": a pattern for white space in JSON.
"form_after_reasoning": a structured output that begins when the model ends its reasoning.
"calls": grammars of tool calls. "resumed_form": structured outputs that continue where another
worker left them. "extra", "text": that field of `GenerateRequest`."""
OWN_FEATURES: tuple[Feature, ...] = ("logprobs", "logit_bias")
"""Features that the native engine has, and the mock engine, too."""


class EngineInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Properties of an engine that are fixed after its start.

    `data_parallel` is the number of ranks. Ranks share `num_blocks` and `max_num_seqs` equally, and
    each computes its own steps. `roles`: a worker without decode only computes prompts for others,
    a worker without prefill only its own. `prefix_caching`: prompts reuse the blocks of other
    prompts. `kv_events`: the engine tells its cached blocks; otherwise routers predict them.
    `features`: what requests may need; others get no request that needs it. `adapters`: the path of
    each loaded LoRA adapter by `core.adapters.adapter_id`; ids of replaced ones are features.
    `sampling`: what the engine itself takes for sampling that a request omits, the model's own
    defaults included, by the names of `SamplingParams` and `max_tokens`; empty for own engines.
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
    kv_events: bool = True
    features: tuple[str, ...] = OWN_FEATURES
    adapters: dict[str, str] = {}
    sampling: dict[str, float] = {}


class EngineTotals(msgspec.Struct):
    """Totals of an engine since its start."""

    requests: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    evicted_blocks: int = 0


Tier = Literal["device", "host", "disk", "shared"]
"""Place of a block: accelerator memory, host memory, local disk, or a store shared by all hosts."""


class TierLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of one memory tier below the device.

    `block_s`: seconds to load one block, as learnt; a sender rounds it to two digits. `queue_s`:
    seconds until the loads in flight are done. A tier that can load nothing is left out.
    """

    name: Tier
    block_s: float
    queue_s: float = 0.0
    blocks: int = 0
    capacity_blocks: int = 0


class Load(msgspec.Struct, frozen=True, omit_defaults=True):
    """The present load of an engine. `prefill_tokens`: prompt tokens still to compute.

    `cached_blocks`: blocks with a content hash, in use or not. `arriving`: how many of `running`
    wait for KV blocks from another worker. `gaps`, `slow_gaps`: totals of the times between two
    tokens of an answer, and of those above `GenerateRequest.itl_slo_ms`.
    `transfer_bytes_per_s`: learnt rate at which KV blocks come from other workers; 0: unknown.
    `ranks`: the load of each of several data-parallel ranks. `tiers`: the memory tiers below the
    device, the fastest first. `timing`: the coefficients of a linear `Timing` as learnt, in ms.
    `last_pause`: when the worker's event loop last stood still until (Unix time), and for how long.
    `core_wait_s`: in all, a thread of it was ready so long, but had no core.
    """

    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    active_blocks: int = 0
    total_blocks: int = 0
    steps: int = 0
    cached_blocks: int = 0
    arriving: int = 0
    gaps: int = 0
    slow_gaps: int = 0
    transfer_bytes_per_s: float = 0.0
    ranks: tuple[Load, ...] = ()
    tiers: tuple[TierLoad, ...] = ()
    timing: tuple[float, ...] = ()
    last_pause: tuple[float, float] | None = None
    core_wait_s: float = 0.0


def sum_loads(loads: Iterable[Load]) -> Load:
    """Return the sum of all counts, without `ranks` and what follows."""
    counts: list[Any] = [*map(sum, zip(*(astuple(load)[:-5] for load in loads), strict=True))]
    return Load(*counts)


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


def read_field(source: Any, *names: str, default: Any = None) -> Any:
    """Return the first of these attributes or keys of `source` that is not None, else `default`."""
    for name in names:
        value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
        if value is not None:
            return value
    return default
