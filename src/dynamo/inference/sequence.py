"""One sequence as the step scheduler sees it: how long it is, how much of it is computed, and the
blocks that hold it. What it consists of (token ids, or hashes alone) is its content."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence as Listed
from typing import TYPE_CHECKING, Any

from dynamo.core.hashing import block_hashes, root_hash

if TYPE_CHECKING:
    import asyncio

    from dynamo.core.reply import Reply
    from dynamo.core.values import GenerateRequest
    from dynamo.inference.block import Block

NO_TOKENS = array("I")


class SequenceContent(ABC):
    """What a sequence consists of, as far as the scheduler cares: a chain of block hashes."""

    __slots__ = ("hashes", "root")

    root: int
    """The parent of the first block."""
    hashes: list[int]
    """Hashes of the first full blocks, as many as were asked for."""

    @abstractmethod
    def ensure_hashes(self, blocks: int) -> None:
        """Make `hashes` at least `blocks` long; those blocks' tokens are all known."""

    @abstractmethod
    def append_token(self, token: int) -> None:
        """The next token was sampled."""

    def append_tokens(self, tokens: Listed[int]) -> None:
        """These were sampled, one after the other."""
        for token in tokens:
            self.append_token(token)


class TokenContent(SequenceContent):
    """Token ids, prompt and output; block identity as in `core.hashing`."""

    __slots__ = ("_block_tokens", "tokens")

    def __init__(self, token_ids: bytes, block_tokens: int, salt: str = "") -> None:
        self.tokens = array("I")
        self.tokens.frombytes(token_ids)
        self.root = root_hash(salt)
        self.hashes = []
        self._block_tokens = block_tokens

    def ensure_hashes(self, blocks: int) -> None:
        hashes = self.hashes
        done = len(hashes)
        if blocks <= done:
            return
        parent = hashes[-1] if hashes else self.root
        size = self._block_tokens
        hashes += block_hashes(self.tokens[done * size : blocks * size].tobytes(), size, parent)

    def append_token(self, token: int) -> None:
        self.tokens.append(token)


class RequestState:
    """Connects a sequence with the request that waits for it.

    `completion` ends `Engine.generate`. `reply_begun` is True once `reply.begin` was called.
    """

    __slots__ = ("completion", "reply", "reply_begun")

    def __init__(self, reply: Reply, completion: asyncio.Future[None]) -> None:
        self.reply = reply
        self.completion = completion
        self.reply_begun = False

    def complete(self, error: BaseException | None = None) -> None:
        """End `Engine.generate`, with `error` if there is one. A second call changes nothing."""
        if self.completion.done():
            return
        if error is None:
            self.completion.set_result(None)
        else:
            self.completion.set_exception(error)


class EngineSequence:
    """One choice of one request on its way through the engine. The scheduler alone changes it.

    `length`: tokens known (prompt and output). `computed`: how many of them have their KV in the
    sequence's blocks. `max_length`: where it ends for length. `slot` is the runner's own, kept
    between steps.
    """

    __slots__ = (
        "admitted",
        "arrival",
        "blocks",
        "cached_tokens",
        "computed_tokens",
        "content",
        "ended",
        "length",
        "max_length",
        "min_length",
        "preemptions",
        "priority",
        "prompt_tokens",
        "registered_blocks",
        "request",
        "request_state",
        "runner_state",
        "stop_ids",
        "tokens",
    )

    request_state: RequestState
    """Set by the engine before the sequence enters the scheduler, which does not read it."""

    def __init__(
        self,
        content: SequenceContent,
        prompt_tokens: int,
        max_tokens: int,
        *,
        priority: int = 0,
        request: GenerateRequest | None = None,
    ) -> None:
        self.content = content
        self.tokens: array[int] = content.tokens if isinstance(content, TokenContent) else NO_TOKENS
        self.request = request
        self.prompt_tokens = prompt_tokens
        self.length = prompt_tokens
        self.max_length = prompt_tokens + max_tokens
        self.min_length = prompt_tokens
        self.stop_ids: frozenset[int] = frozenset()
        self.priority = priority
        self.arrival = 0
        self.computed_tokens = 0
        self.registered_blocks = 0
        self.blocks: list[Block] = []
        self.cached_tokens = 0
        self.preemptions = 0
        self.admitted = False
        self.ended = False
        self.runner_state: Any = None

    @property
    def output_tokens(self) -> int:
        """Tokens that this attempt has generated."""
        return self.length - self.prompt_tokens

    @property
    def banned_ids(self) -> frozenset[int]:
        """Ids that must not be sampled now: those that would stop before `min_tokens`."""
        return self.stop_ids if self.length < self.min_length else frozenset()
