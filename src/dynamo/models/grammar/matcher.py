"""GrammarMatcher: which tokens may come next in one answer. Workers use it while they sample."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from dynamo.core.codec import unpack_ids
from dynamo.core.errors import ModelUnavailable, SchemaTooComplex
from dynamo.core.values import StructuredOutput
from dynamo.models.grammar.grammar_text import grammar_text, parser_limits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 256
"""So many compiled grammars are remembered."""
SLICE_CHARS = (7, 8, 9, 10, 12, 30)
VOCABULARY_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(rf'[^"\\\x00-\x1F\x7F]{{1,{chars}}}' for chars in SLICE_CHARS),
    r'[^"\\\x00-\x1F\x7F]+',
]
"""Groups of tokens. A mask has a whole group at once where a part of the structured output allows
all of it. Strings with a `maxLength` allow tokens of at most as many characters as may still come.
Finer groups for few characters make masks slower: longer tokens are then searched in several
groups."""


class GrammarMatcher:
    """Follows the tokens of one answer.

    `finished`: the answer is complete, so that it must end. `error`: why no token can be chosen;
    empty: none. Reasoning before the constrained part is free, but cannot end the answer:
    `reasoning_mask` has a bit for each token that it may have. Without a `matcher`, any text may
    follow, and only the length of reasoning is bounded.
    """

    __slots__ = (
        "_fed",
        "_limit",
        "_matcher",
        "_reasoning_end",
        "_reasoning_mask",
        "_reasoning_tokens",
        "_start_id",
        "_tail",
        "error",
        "finished",
    )

    def __init__(
        self,
        matcher: LLMatcher | None,
        structured: StructuredOutput,
        reasoning_mask: bytes | None = None,
    ) -> None:
        self._matcher = matcher
        self._reasoning_mask = reasoning_mask
        self._reasoning_tokens = 0
        self._limit = structured.reasoning_limit
        self._fed = 0
        start, end = structured.reasoning_start, structured.reasoning_end
        self._start_id = unpack_ids(start)[0] if start else None
        self._reasoning_end = list(unpack_ids(end))
        self._tail: list[int] | None = [] if end and not start else None
        self.finished = False
        self.error = ""

    def feed(self, tokens: Sequence[int], first: int) -> bool:
        """Read the tokens of the answer that are new. The answer begins at `first` of `tokens`.
        Returns False after an error."""
        for token in tokens[first + self._fed :]:
            self._fed += 1
            if self._tail is not None:
                self._reason(token)
            elif token == self._start_id and (self._fed == 1 or self._matcher is None):
                self._tail = []
            elif self._matcher is None:
                continue
            elif self.finished or not self._matcher.consume_token(token):
                self.fail(f"token {token} is not allowed: {self._matcher.get_error()}")
                break
            else:
                self.finished = self._matcher.is_stopped()
        return not self.error

    def mask(self) -> bytes | None:
        """Return one bit for each token that may come next, the lowest bit of a byte first; bits
        may be missing at the end. None for any token, and after an error."""
        if self.error:
            return None
        if self._tail is not None:
            if self._limit is not None and self._reasoning_tokens >= self._limit:
                return _mask_of(self._reasoning_end[0])
            return self._reasoning_mask
        matcher = self._matcher
        if matcher is None:
            return None
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            self.fail(matcher.get_error())
            return None
        if self._start_id is not None and not self._fed:
            row = bytearray(mask)
            row[self._start_id >> 3] |= 1 << (self._start_id & 7)
            return bytes(row)
        return mask

    def fail(self, reason: str) -> None:
        """Record that the answer cannot continue."""
        self.error = self.error or reason.partition("\n")[0]

    def failure(self) -> SchemaTooComplex:
        """Return the error that ends the answer."""
        return SchemaTooComplex(
            f"the structured output could not be enforced: {self.error}",
            hint="simplify the schema or grammar",
            param="response_format",
        )

    def _reason(self, token: int) -> None:
        end = self._reasoning_end
        self._tail = [*(self._tail or ()), token][-len(end) :]
        if self._tail == end:
            self._tail = None
        else:
            self._reasoning_tokens += 1


class GrammarCompiler:
    """Compiles grammars for the tokenizer of one model. Methods block, and may run in threads.

    `eos_ids` are the tokens that may end an answer. Tables of the vocabulary are built by the first
    grammar.
    """

    def __init__(self, tokenizer: Path, eos_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = tuple(eos_ids)
        self._compiled: OrderedDict[tuple[str, ...], LLMatcher] = OrderedDict()
        self._lock = Lock()

    def open_matcher(self, structured: StructuredOutput) -> GrammarMatcher:
        """Return a matcher at the beginning of an answer. Raises `InvalidRequest` and
        `SchemaTooComplex`."""
        matcher = self.copy_compiled(structured)
        if matcher is not None:
            return matcher
        compiled = self._compile(structured)
        with self._lock:
            self._compiled[_key(structured)] = compiled
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return self._copy(compiled, structured)

    def copy_compiled(self, structured: StructuredOutput) -> GrammarMatcher | None:
        """Return a matcher of a structured output that needs no compilation; None for another one.
        Takes microseconds."""
        if structured.kind == "text":
            return GrammarMatcher(None, structured)
        key = _key(structured)
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is None:
                return None
            self._compiled.move_to_end(key)
        return self._copy(compiled, structured)

    def _copy(self, compiled: LLMatcher, structured: StructuredOutput) -> GrammarMatcher:
        tables = _vocabulary_tables(self._tokenizer, self._eos_ids)
        mask = _mask_without(self._eos_ids, tables.vocab_size)
        return GrammarMatcher(compiled.deep_copy(), structured, mask)

    def _compile(self, structured: StructuredOutput) -> LLMatcher:
        from llguidance import LLMatcher

        tables = _vocabulary_tables(self._tokenizer, self._eos_ids)
        matcher = LLMatcher(tables, grammar_text(structured), log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise SchemaTooComplex(
                f"the structured output cannot be enforced: {matcher.get_error()}",
                param="response_format",
            )
        return matcher


def _key(structured: StructuredOutput) -> tuple[str, ...]:
    return structured.kind, structured.value, structured.whitespace_pattern


@lru_cache(maxsize=2)
def _mask_without(ids: tuple[int, ...], vocab_size: int) -> bytes:
    """Return a mask of all tokens but `ids`."""
    mask = bytearray(b"\xff" * (-(-vocab_size // 8)))
    for token in ids:
        mask[token >> 3] &= ~(1 << (token & 7)) & 0xFF
    return bytes(mask)


def _mask_of(token: int) -> bytes:
    """Return a mask of one token, which ends with its byte."""
    return bytes(token >> 3) + bytes((1 << (token & 7),))


@lru_cache(maxsize=2)
def _vocabulary_tables(tokenizer: Path, eos_ids: tuple[int, ...]) -> LLTokenizer:
    """Return the tables of a vocabulary, which the ranks of a worker share."""
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(
            str(tokenizer), eos_token=list(eos_ids) or None, slices=VOCABULARY_SLICES
        )
    except Exception as error:
        raise ModelUnavailable(
            f"structured output needs tables of the tokenizer {tokenizer}, which cannot be built: "
            f"{error}"
        ) from error
