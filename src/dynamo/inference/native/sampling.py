"""Samples the next token from a row of logits.

Randomness depends only on (seed, choice, output position), one number a token. A request can
therefore continue on another worker.

Filters run in vLLM's order: logit bias, penalties, temperature, min-p, top-k, top-p. Each keeps a
prefix of the tokens sorted by probability, so only the tokens that are needed are sorted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from dynamo.core.values import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from dynamo.inference.native.buffers import Floats
    from dynamo.inference.sequence import EngineSequence

Ids = np.ndarray[Any, np.dtype[np.intp]]

GREEDY_TEMPERATURE = 1e-5
"""Below this temperature only exact ties would be random. Source: vLLM."""
MAX_LOGIT = float(np.finfo(np.float32).max)
MAX_TOP_LOGPROBS = 20
INITIAL_CANDIDATES = 128
PARTITION_SIZE = 64
FEW_ALLOWED = 8
"""Below one allowed token of so many, the logits of the allowed ones are copied."""
UPPER_LIMITS = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, np.inf, -MAX_LOGIT).astype(
    np.float32
)
"""[256, 8]: the upper limits of the logits of eight tokens, by their byte in a mask."""
_seed_struct = Struct("<qqq")


def uniform(seed: int, choice: int, position: int) -> float:
    """Return a number in [0, 1) that depends only on the arguments."""
    key = _seed_struct.pack((seed + (1 << 63)) % (1 << 64) - (1 << 63), choice, position)
    return (xxhash.xxh3_64_intdigest(key) >> 11) * 2.0**-53


def sample(
    logits: Floats, sequences: Sequence[EngineSequence]
) -> tuple[list[int], list[TokenLogprobs | None] | None]:
    """Sample one token for each row of `logits` [sequences, vocabulary], which may be changed.
    Logprobs are those of the unmodified distribution, for the sequences that request them. Raises
    `ArithmeticError` if logits are not finite."""
    requests = [sequence.request for sequence in sequences]
    top_counts = [None if request is None else request.top_logprobs for request in requests]
    logprobs = {
        row: log_softmax(logits[row]) for row, top in enumerate(top_counts) if top is not None
    }
    # Each mask reads all tables of the vocabulary, which rows of logits push out of CPU caches.
    grammars = [sequence.grammar for sequence in sequences]
    masks = [None if grammar is None else grammar.mask() for grammar in grammars]
    tokens = list(map(sample_row, logits, sequences, masks))
    if not logprobs:
        return tokens, None
    return tokens, [
        None if top is None else make_token_logprobs(logprobs[row], tokens[row], top)
        for row, top in enumerate(top_counts)
    ]


def sample_row(row: Floats, sequence: EngineSequence, mask: bytes | None = None) -> int:
    """Sample one token that `mask` allows, None: any. `row` may be changed."""
    request = sequence.request
    if request is None:
        return _argmax(row)
    sampling = request.sampling
    apply_penalties(row, sampling, sequence)
    if mask is None and (banned := sequence.banned_ids):
        row[[token for token in banned if token < len(row)]] = -MAX_LOGIT
    chance = None
    if sampling.temperature >= GREEDY_TEMPERATURE and sampling.top_k != 1:
        chance = uniform(sampling.seed, request.choice, request.resumed + sequence.output_tokens)
    if mask is not None:
        token = sample_masked(row, mask, sampling, chance)
        if token < 0 and sequence.grammar is not None:
            sequence.grammar.fail("no token of the vocabulary is allowed")
        return max(0, token)
    return _argmax(row) if chance is None else sample_filtered(row, sampling, chance)


def sample_masked(row: Floats, mask: bytes, sampling: SamplingParams, chance: float | None) -> int:
    """Sample a token whose bit in `mask` is set. `chance` None: the most probable one. Where few
    tokens are allowed only their logits are read: filters would sort all forbidden ones, as ties.
    """
    if chance is None:
        token = _argmax(row)
        if token >> 3 < len(mask) and mask[token >> 3] >> (token & 7) & 1:
            return token
    count = int.from_bytes(mask, "little").bit_count()
    if count * FEW_ALLOWED < len(row):
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(row), bitorder="little")
        ids = np.flatnonzero(bits.view(np.bool_))  # booleans: five times as fast as bytes
        if not len(ids):
            return -1
        row = row[ids]
        return int(ids[_argmax(row) if chance is None else sample_filtered(row, sampling, chance)])
    limits = UPPER_LIMITS.take(np.frombuffer(mask, np.uint8), axis=0).ravel()[: len(row)]
    np.minimum(row[: len(limits)], limits, out=row[: len(limits)])
    row[len(limits) :] = -MAX_LOGIT
    return _argmax(row) if chance is None else sample_filtered(row, sampling, chance)


def _argmax(row: Floats) -> int:
    token = int(row.argmax())
    check_finite(float(row[token]))
    return token


def check_finite(best: float) -> None:
    """Raise `ArithmeticError` if `best`, the highest logit, is not finite. A row with a NaN has NaN
    as its maximum."""
    if not math.isfinite(best):
        raise ArithmeticError("the model's logits are not finite: its weights may be damaged")


def apply_penalties(row: Floats, sampling: SamplingParams, sequence: EngineSequence) -> None:
    """Apply bias and penalties in place. Presence and frequency penalties count generated tokens.
    The repetition penalty also counts the prompt."""
    for token, bias in sampling.logit_bias.items():
        if 0 <= token < len(row):
            row[token] += bias
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(np.asarray(sequence.tokens[:]))
        logits, penalty = row[seen].astype(np.float64), sampling.repetition_penalty
        changed = np.where(logits > 0, logits / penalty, logits * penalty)
        row[seen] = np.clip(changed, -MAX_LOGIT, MAX_LOGIT)
    if sampling.presence_penalty or sampling.frequency_penalty:
        resumed = sequence.request.resumed if sequence.request is not None else 0
        first = sequence.prompt_tokens - resumed
        ids, counts = np.unique(np.asarray(sequence.tokens[first:]), return_counts=True)
        penalties = sampling.presence_penalty + sampling.frequency_penalty * counts
        row[ids] -= penalties.astype(np.float32)


def sample_filtered(row: Floats, sampling: SamplingParams, chance: float) -> int:
    """Return the token at `chance` of the filtered distribution. Tokens are ordered by probability,
    ties by id. If nothing is filtered they are ordered by id."""
    best = row.max()
    check_finite(float(best))
    limit = sampling.top_k if 0 < sampling.top_k < len(row) else len(row)
    whole = 0.0
    if limit == len(row) and sampling.min_p <= 0.0:
        weights = (row - best) / np.float32(sampling.temperature)
        np.exp(weights, out=weights)
        if sampling.top_p >= 1.0:
            return _sample_unfiltered(weights, chance)
        whole = float(weights.sum(dtype=np.float64))
    count = min(limit, INITIAL_CANDIDATES)
    while True:
        ids = top_ids(row, count)
        logits = row[ids].astype(np.float64)
        sorted_weights = np.exp((logits - float(best)) / sampling.temperature)
        index = _sample_sorted(sorted_weights, limit, sampling, whole, chance)
        if index is not None:
            return int(ids[index])
        count = min(limit, count * 8)


def _sample_unfiltered(weights: Floats, chance: float) -> int:
    """Return the token at `chance` among all tokens, ordered by id."""
    sums = np.cumsum(weights, dtype=np.float64)
    token = int(np.searchsorted(sums, chance * float(sums[-1]), side="right"))
    return min(token, int(np.flatnonzero(weights)[-1]))


def _sample_sorted(
    weights: np.ndarray[Any, np.dtype[np.float64]],
    limit: int,
    sampling: SamplingParams,
    whole: float,
    chance: float,
) -> int | None:
    """Return the index at `chance` among the sorted `weights`, or None if more are needed. `whole`
    is the sum over all tokens if neither top-k nor min-p filters, else 0."""
    complete = len(weights) >= limit
    if sampling.min_p > 0.0:
        min_p_count = int(np.count_nonzero(weights >= sampling.min_p))
        complete = complete or min_p_count < len(weights)
        weights = weights[: max(1, min_p_count)]
    sums = np.cumsum(weights)
    if complete:
        total = float(sums[-1])
    elif whole:
        total = max(whole, float(sums[-1]))
    else:
        return None
    if sampling.top_p < 1.0:
        cut = int(np.searchsorted(sums, sampling.top_p * total))
        if cut >= len(sums):
            if not complete:
                return None
            cut = len(sums) - 1
        total = float(sums[cut])
    index = int(np.searchsorted(sums, chance * total, side="right"))
    if index >= len(sums):
        return len(sums) - 1 if complete else None
    return index


def top_ids(row: Floats, count: int) -> Ids:
    """Return the ids of the `count` highest logits, best first, ties by id. The row is cut into
    pieces. The lowest of the `count` highest piece maxima is a lower bound of the result, so only a
    few ids are sorted."""
    pieces = len(row) // PARTITION_SIZE
    if count * 4 >= pieces:
        if count * 2 >= len(row):
            return _sort_descending(row, np.arange(len(row)), count)
        bound = np.partition(row, len(row) - count)[len(row) - count]
        return _sort_descending(row, np.flatnonzero(row >= bound), count)
    maxima = row[: pieces * PARTITION_SIZE].reshape(pieces, PARTITION_SIZE).max(axis=1)
    bound = np.partition(maxima, pieces - count)[pieces - count]
    return _sort_descending(row, np.flatnonzero(row >= bound), count)


def _sort_descending(row: Floats, ids: Ids, count: int) -> Ids:
    order = np.argsort(-row[ids], kind="stable")[:count]
    return ids[order]


def log_softmax(row: Floats) -> Floats:
    """Return natural-log probabilities."""
    shifted: Floats = row - row.max()
    total = np.exp(shifted).sum(dtype=np.float64)
    shifted -= np.float32(math.log(total))
    return shifted


def make_token_logprobs(logprobs: Floats, token: int, top: int) -> TokenLogprobs:
    """Return the logprob of the chosen token and the `top` best ones."""
    best: Iterable[int] = top_ids(logprobs, min(top, MAX_TOP_LOGPROBS)).tolist() if top else ()
    return TokenLogprobs(
        token,
        float(logprobs[token]),
        tuple((candidate, float(logprobs[candidate])) for candidate in best),
    )
