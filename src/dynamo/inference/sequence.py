"""A sequence as the step scheduler sees it: its length, its computed part and its KV blocks.

The tokens are behind `SequenceContent`: real engines hold token ids, simulations only block hashes.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import msgspec

from dynamo.core.errors import InvalidRequest
from dynamo.core.hashing import (
    IDENTITY_BYTES,
    TOKEN_BYTES,
    block_hashes,
    prefix_identities,
    root_hash,
    root_identity,
)
from dynamo.core.values import Finish

if TYPE_CHECKING:
    import asyncio

    from dynamo.core.context import Context
    from dynamo.core.reply import Reply
    from dynamo.core.timing.worker_times import SequenceTimes, WorkerTimes
    from dynamo.core.values import FinishReason, GenerateRequest, PromptTokenLogprob
    from dynamo.inference.block import Block
    from dynamo.inference.kv_source import KvSource
    from dynamo.models.grammar.matcher import GrammarMatcher

_KEY = os.urandom(16)
"""The key of fingerprints in this process."""
FINGERPRINTS_AT_ONCE = 64
NO_TOKENS = array("I")
"""The `tokens` of a sequence whose content has no token ids. Nothing may append to it."""


class SequenceContent(ABC):
    """The content of a sequence, which the scheduler sees as a chain of block hashes."""

    __slots__ = ("hashes", "root")

    root: int
    """The parent hash of the first block."""
    hashes: list[int]
    """Hashes of the first full blocks, as many as `ensure_hashes` has computed."""

    @abstractmethod
    def ensure_hashes(self, blocks: int) -> None:
        """Extend `hashes` to at least `blocks` entries. All tokens of those blocks are known."""

    def fingerprint(self, block: int) -> int:
        """Return a keyed hash of the tokens of a full block; 0 if there are no token ids."""
        del block
        return 0

    def list_fingerprints(self, first: int, end: int) -> Sequence[int]:
        """Return those of the full blocks from `first` up to `end`."""
        return (0,) * (end - first)

    @abstractmethod
    def append_token(self, token: int) -> None:
        """Add the token that was sampled next."""

    def append_tokens(self, tokens: Sequence[int]) -> None:
        """Add several sampled tokens in order."""
        for token in tokens:
            self.append_token(token)


class TokenContent(SequenceContent):
    """The token ids of prompt and output. Block hashes are those of `core.hashing`."""

    __slots__ = ("block_tokens", "fingerprints", "identity", "tokens")
    tokens: TokenIds
    fingerprints: list[int]
    """Keyed hashes of the first full blocks."""
    identity: bytes
    """The identity above the first block, if fingerprints are to be the blocks' identities: chained
    and the same in every process (`core.hashing.prefix_identities`). Else empty."""

    def __init__(self, token_ids: bytes, block_tokens: int, salt: str = "") -> None:
        self.tokens = tokens = array("I")
        tokens.frombytes(token_ids)
        self.root = root_hash(salt)
        self.hashes = []
        self.fingerprints = []
        self.identity = b""
        self.block_tokens = block_tokens

    def ensure_hashes(self, blocks: int) -> None:
        hashes = self.hashes
        hashed = len(hashes)
        if blocks <= hashed:
            return
        parent = hashes[-1] if hashes else self.root
        size = self.block_tokens
        hashes += block_hashes(self.tokens[hashed * size : blocks * size].tobytes(), size, parent)

    def fingerprint(self, block: int) -> int:
        known, size = self.fingerprints, self.block_tokens
        if block >= len(known):
            end = min(block + FINGERPRINTS_AT_ONCE, len(self.tokens) // size)
            ids = self.tokens[len(known) * size : end * size].tobytes()
            step = size * TOKEN_BYTES
            if self.identity:
                parent = known[-1].to_bytes(IDENTITY_BYTES) if known else self.identity
                known += map(int.from_bytes, prefix_identities(ids, size, parent))
            else:
                known += [hash(_KEY + ids[at : at + step]) for at in range(0, len(ids), step)]
        return known[block]

    def list_fingerprints(self, first: int, end: int) -> Sequence[int]:
        while len(self.fingerprints) < end:
            self.fingerprint(len(self.fingerprints))
        return self.fingerprints[first:end]

    def append_token(self, token: int) -> None:
        self.tokens.append(token)


class ForkedTokens(Sequence[int]):
    """Token ids of a prompt that several sequences share, and of one sequence's output."""

    __slots__ = ("_output", "_prompt", "_prompt_length")

    def __init__(self, prompt: TokenIds) -> None:
        self._prompt = prompt
        self._prompt_length = len(prompt)
        self._output = array("I")

    def __len__(self) -> int:
        return self._prompt_length + len(self._output)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> array[int]: ...

    def __getitem__(self, index: int | slice) -> int | array[int]:
        length = self._prompt_length
        if isinstance(index, int):
            at = index if index >= 0 else index + len(self)
            return self._prompt[at] if at < length else self._output[at - length]
        start, stop, _ = index.indices(len(self))
        if stop <= length:
            return self._prompt[start:stop]
        output = self._output[max(0, start - length) : stop - length]
        return self._prompt[start:] + output if start < length else output

    def append(self, token: int) -> None:
        """Add a token of the output."""
        self._output.append(token)

    def tobytes(self) -> bytes:
        """Return all ids as packed u32."""
        return self._prompt.tobytes() + self._output.tobytes()


TokenIds: TypeAlias = "array[int] | ForkedTokens"
"""Token ids of one sequence. Slices are arrays."""


class ForkedContent(TokenContent):
    """The content of one of several sequences with the same `prompt`. Each adds its own output."""

    __slots__ = ("_prompt",)

    def __init__(self, prompt: TokenContent) -> None:
        self._prompt = prompt
        self.block_tokens = prompt.block_tokens
        self.tokens = ForkedTokens(prompt.tokens)
        self.root = prompt.root
        self.hashes = prompt.hashes
        self.fingerprints = []
        self.identity = prompt.identity

    def ensure_hashes(self, blocks: int) -> None:
        prompt = self._prompt
        if self.hashes is prompt.hashes:
            prompt.ensure_hashes(min(blocks, len(prompt.tokens) // self.block_tokens))
            if blocks <= len(self.hashes):
                return
            self.hashes = prompt.hashes.copy()
        super().ensure_hashes(blocks)

    def fingerprint(self, block: int) -> int:
        prompt = self._prompt
        full = len(prompt.tokens) // self.block_tokens
        if block < full:
            return prompt.fingerprint(block)
        if full and not self.fingerprints:
            prompt.fingerprint(full - 1)
            self.fingerprints = prompt.fingerprints[:full]
        return super().fingerprint(block)

    def list_fingerprints(self, first: int, end: int) -> Sequence[int]:
        return [self.fingerprint(block) for block in range(first, end)]


class RequestState(msgspec.Struct, eq=False):
    """Connects a sequence with the request that waits for it. `completion` ends `Engine.generate`.
    `reply_begun` is True once `reply.begin` was called."""

    reply: Reply
    completion: asyncio.Future[None]
    context: Context
    times: SequenceTimes
    reply_begun: bool = False

    def complete(self, error: BaseException | None = None) -> None:
        """End `Engine.generate`, with `error` if there is one. A second call changes nothing."""
        if self.completion.done():
            return
        if error is None:
            self.completion.set_result(None)
        else:
            self.completion.set_exception(error)


@dataclass(slots=True, eq=False)
class EngineSequence:
    """A choice of a request inside an engine. Only the scheduler changes its state. A dataclass,
    because attributes of a Struct take twice as long and steps read many of them.

    - `length`: known tokens of prompt and output; `max_length` ends the answer.
    - `tokens`: the ids in `content`, or `NO_TOKENS`.
    - `computed_tokens`: tokens whose keys and values are in `blocks`.
    - `cached_tokens`: prompt tokens that the prefix cache supplied at the first admission.
    - `registered_blocks`: how many of `blocks` the block pool has registered.
    - `sources`: where the blocks of its prompt come from, in order, until they have arrived.
    - `grammar`: the form of the answer; None: any. The loop feeds it, the runner reads its mask.
    - `prefill_only`: another worker pulls the blocks of its prompt and writes the answer.
    - `request_state`: set by the engine before the sequence enters the scheduler, which does not
      read it.
    - `prompt_logprobs`: those of the prompt tokens that the runner has computed, if wanted.
    - `runner_state`: private data of the `ModelRunner`, kept between steps.
    """

    content: SequenceContent
    prompt_tokens: int
    max_tokens: int
    priority: int = 0
    request: GenerateRequest | None = None
    request_state: RequestState = field(init=False)
    tokens: TokenIds = field(init=False)
    length: int = field(init=False)
    max_length: int = field(init=False)
    min_length: int = field(init=False)
    stop_ids: frozenset[int] = frozenset()
    arrival: int = 0
    computed_tokens: int = 0
    registered_blocks: int = 0
    blocks: list[Block] = field(default_factory=list)
    cached_tokens: int = 0
    preemptions: int = 0
    admitted: bool = False
    ended: bool = False
    sources: Sequence[KvSource] = ()
    prefill_only: bool = False
    grammar: GrammarMatcher | None = None
    runner_state: Any = None
    prompt_logprobs: list[PromptTokenLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.length = self.min_length = self.prompt_tokens
        self.max_length = self.prompt_tokens + self.max_tokens
        self.tokens = self.content.tokens if isinstance(self.content, TokenContent) else NO_TOKENS

    @property
    def output_tokens(self) -> int:
        """Tokens that this attempt has generated."""
        return self.length - self.prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the whole prompt must be computed, because cached tokens have no logits."""
        return self.request is not None and self.request.prompt_logprobs is not None

    @property
    def banned_ids(self) -> frozenset[int]:
        """Stop ids that must not be sampled now, because `min_tokens` is not reached."""
        return self.stop_ids if self.length < self.min_length else frozenset()

    def make_finish(
        self, reason: FinishReason, stop_token: int | None, times: WorkerTimes
    ) -> Finish:
        """Return the end of the answer."""
        logprobs = tuple(self.prompt_logprobs)
        return Finish(reason, self.output_tokens, stop_token, prompt_logprobs=logprobs, times=times)

    def feed_grammar(self) -> bool:
        """Let the grammar read the new tokens of the answer, with those of earlier attempts.
        Returns False if they do not fit."""
        resumed = self.request.resumed if self.request is not None else 0
        return self.grammar is None or self.grammar.feed(self.tokens, self.prompt_tokens - resumed)


ResolveRequest = Callable[["GenerateRequest"], tuple[SequenceContent, int, int]]
"""Returns a request's content, its prompt length and its answer length, for simulations."""


class SequenceFactory(msgspec.Struct, frozen=True):
    """Makes sequences for blocks of `block_tokens`. `resolve` supplies contents of simulations.
    `vocab_size` 0: any token id is valid."""

    block_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    resolve: ResolveRequest | None
    has_tiers: bool

    def make(self, request: GenerateRequest) -> EngineSequence:
        """Return a new sequence. Raises `InvalidRequest`."""
        if self.resolve is not None:
            return EngineSequence(*self.resolve(request), request=request)
        group = request.group
        if group is None or not group.covers(request):
            content = self._make_content(request)
        else:
            if group.engine_prompt is None:
                group.engine_prompt = self._make_content(request)
            content = ForkedContent(group.engine_prompt)
        stops = request.stops
        if stops.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        sequence = EngineSequence(
            content,
            len(content.tokens),
            stops.max_tokens,
            priority=request.priority,
            request=request,
        )
        sequence.min_length += stops.min_tokens
        stop_ids = frozenset(stops.stop_token_ids)
        sequence.stop_ids = stop_ids if stops.ignore_eos else stop_ids | self.eos_token_ids
        return sequence

    def _make_content(self, request: GenerateRequest) -> TokenContent:
        content = TokenContent(request.token_ids, self.block_tokens, request.salt)
        if self.has_tiers:
            content.identity = root_identity(request.salt)
        largest = max(content.tokens, default=0)
        if self.vocab_size and largest >= self.vocab_size:
            raise InvalidRequest(
                f"token id {largest} is not in the vocabulary of {self.vocab_size}",
                param="prompt",
            )
        return content
