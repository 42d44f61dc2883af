"""Samples on the device, with the random numbers and the rules of `native/sampling.py`.

Rows that want the same treatment are computed together. Only penalties and forms of answers need
tables, which the host makes; tokens and logprobs come back in one copy each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from dynamo.core.values import TokenLogprobs
from dynamo.inference.native.sampling import (
    GREEDY_TEMPERATURE,
    MAX_LOGIT,
    MAX_TOP_LOGPROBS,
    check_finite,
    uniform,
)

if TYPE_CHECKING:
    from dynamo.core.values import GenerateRequest, SamplingParams
    from dynamo.inference.sequence import EngineSequence


def sample(
    logits: torch.Tensor | None,
    sequences: Sequence[EngineSequence],
    on_tokens: Callable[[torch.Tensor], None] | None = None,
) -> tuple[list[int], list[TokenLogprobs | None] | None]:
    """Sample one token for each row of `logits` [sequences, vocabulary] float32, which are changed.
    Logprobs are those of the unmodified distribution. `on_tokens` gets the tokens [sequences] on
    the device before the host waits for them. Raises `ArithmeticError` if logits are not finite."""
    if logits is None or not sequences:
        return [], None
    requests = [sequence.request for sequence in sequences]
    tops = [None if request is None else request.top_logprobs for request in requests]
    wanted = [row for row, top in enumerate(tops) if top is not None]
    logprobs = torch.log_softmax(logits[wanted], -1) if wanted else None
    random_rows: list[int] = []
    for row, (sequence, request) in enumerate(zip(sequences, requests, strict=True)):
        if request is not None:
            _change_row(logits[row], sequence, request)
            sampling = request.sampling
            if sampling.temperature >= GREEDY_TEMPERATURE and sampling.top_k != 1:
                random_rows.append(row)
    best, tokens = logits.max(-1)
    if random_rows:
        tokens[random_rows] = _sample_rows(logits, sequences, random_rows)
    results = HostCopy(torch.stack((tokens.double(), best.double())))
    entries = None
    if logprobs is not None:
        entries = _LogprobEntries(logprobs, tokens[wanted], [tops[row] or 0 for row in wanted])
    if on_tokens is not None:
        on_tokens(tokens)
    token_values, best_values = results.read()
    for sequence, highest in zip(sequences, best_values, strict=True):
        check_finite(highest)
        if sequence.grammar is not None and highest == -MAX_LOGIT:
            sequence.grammar.fail("no token of the vocabulary is allowed")
    ids = list(map(int, token_values))
    if entries is None:
        return ids, None
    pending = iter(entries.read())
    return ids, [None if top is None else next(pending) for top in tops]


def _change_row(row: torch.Tensor, sequence: EngineSequence, request: GenerateRequest) -> None:
    """Apply bias, penalties and what is forbidden to one row of logits, in place."""
    sampling, size = request.sampling, len(row)
    if bias := {token: add for token, add in sampling.logit_bias.items() if 0 <= token < size}:
        row[list(bias)] += torch.tensor(list(bias.values()), device=row.device)
    if sampling.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.asarray(sequence.tokens[:])).astype(np.int64))
        seen, penalty = seen.to(row.device), sampling.repetition_penalty
        values = row[seen].double()
        values = torch.where(values > 0, values / penalty, values * penalty)
        row[seen] = values.clamp(-MAX_LOGIT, MAX_LOGIT).float()
    if sampling.presence_penalty or sampling.frequency_penalty:
        first = sequence.prompt_tokens - request.resumed
        ids, counts = np.unique(np.asarray(sequence.tokens[first:]), return_counts=True)
        penalties = sampling.presence_penalty + sampling.frequency_penalty * counts
        row[torch.from_numpy(ids.astype(np.int64)).to(row.device)] -= torch.from_numpy(
            penalties.astype(np.float32)
        ).to(row.device)
    if sequence.grammar is not None:
        _forbid_unmasked(row, sequence.grammar.mask())
    elif banned := sequence.banned_ids:
        row[[token for token in banned if token < size]] = -MAX_LOGIT


def _forbid_unmasked(row: torch.Tensor, mask: bytes | None) -> None:
    """Forbid the tokens whose bit in `mask` is not set, in place. The bits are spread there."""
    if mask is None:
        return
    packed = torch.frombuffer(bytearray(mask), dtype=torch.uint8).to(row.device)
    bits = packed[:, None] >> torch.arange(8, device=row.device, dtype=torch.uint8) & 1
    allowed = bits.flatten()[: len(row)].bool()
    row[: len(allowed)].masked_fill_(~allowed, -MAX_LOGIT)
    row[len(allowed) :] = -MAX_LOGIT


def _sample_rows(
    logits: torch.Tensor, sequences: Sequence[EngineSequence], rows: Sequence[int]
) -> torch.Tensor:
    """Return a random token for each of `rows`. Tokens are ordered by probability, ties by id; if
    nothing is filtered, by id."""
    plain: list[int] = []
    filtered: list[int] = []
    for place, row in enumerate(rows):
        sampling = _sampling(sequences[row])
        filters = 0 < sampling.top_k < logits.shape[1], sampling.min_p > 0, sampling.top_p < 1
        (filtered if any(filters) else plain).append(place)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    for places, draw in ((plain, _draw_unfiltered), (filtered, _draw_filtered)):
        if places:
            chosen = [rows[place] for place in places]
            tokens[places] = draw(logits[chosen], [sequences[row] for row in chosen])
    return tokens


def _sampling(sequence: EngineSequence) -> SamplingParams:
    assert sequence.request is not None  # noqa: S101 - rows without a request are greedy
    return sequence.request.sampling


def _column(logits: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None].to(logits.device)


def _chances(logits: torch.Tensor, sequences: Sequence[EngineSequence]) -> torch.Tensor:
    """Return the random number of each sequence's next position, [rows, 1]."""
    return _column(logits, [
        uniform(request.sampling.seed, request.choice, request.resumed + sequence.output_tokens)
        for sequence in sequences
        if (request := sequence.request) is not None
    ])  # fmt: skip


def _draw_unfiltered(logits: torch.Tensor, sequences: Sequence[EngineSequence]) -> torch.Tensor:
    temperatures = _column(logits, [_sampling(each).temperature for each in sequences])
    best = logits.amax(-1, keepdim=True)
    weights = torch.exp((logits - best) / temperatures.float())
    sums = weights.double().cumsum(-1)
    tokens = torch.searchsorted(sums, _chances(logits, sequences) * sums[:, -1:], right=True)[:, 0]
    ids = torch.arange(logits.shape[1], device=logits.device)
    last = torch.where(weights > 0, ids, 0).amax(-1)
    return torch.minimum(tokens, last)


def _draw_filtered(logits: torch.Tensor, sequences: Sequence[EngineSequence]) -> torch.Tensor:
    size = logits.shape[1]
    samplings = [_sampling(sequence) for sequence in sequences]
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    ordered = (ordered - ordered[:, :1]).double()
    weights = torch.exp(ordered / _column(logits, [each.temperature for each in samplings]))
    limits = _column(logits, [each.top_k if each.top_k > 0 else size for each in samplings])
    candidates = torch.arange(size, device=logits.device) < limits
    min_p = _column(logits, [each.min_p for each in samplings])
    candidates &= (weights >= min_p) | (min_p <= 0)
    candidates[:, 0] = True
    sums = (weights * candidates).cumsum(-1)
    top_p = _column(logits, [each.top_p for each in samplings])
    cut = torch.searchsorted(sums, top_p * sums[:, -1:])
    cut = torch.where(top_p < 1, cut, size - 1).clamp(max=size - 1)
    totals = sums.take_along_dim(cut, -1)
    places = torch.searchsorted(sums, _chances(logits, sequences) * totals, right=True)
    places = torch.minimum(places, candidates.sum(-1, keepdim=True) - 1)
    return ids.take_along_dim(places, -1)[:, 0]


class _LogprobEntries:
    """The logprobs of the tokens of some rows, and of the best ones: `tops` of each row."""

    def __init__(self, logprobs: torch.Tensor, tokens: torch.Tensor, tops: Sequence[int]) -> None:
        self._tops = [min(top, MAX_TOP_LOGPROBS, logprobs.shape[1]) for top in tops]
        count = max(self._tops)
        parts = [tokens[:, None], logprobs.take_along_dim(tokens[:, None], -1)]
        if count:
            values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
            parts += [ids[:, :count], values[:, :count]]
        self._rows = HostCopy(torch.cat([part.double() for part in parts], -1))

    def read(self) -> list[TokenLogprobs]:
        entries = []
        for top, (token, logprob, *best) in zip(self._tops, self._rows.read(), strict=True):
            half = len(best) // 2
            ids, values = map(int, best[:top]), best[half : half + top]
            entries.append(TokenLogprobs(int(token), logprob, tuple(zip(ids, values, strict=True))))
        return entries


class HostCopy:
    """A tensor on its way to the host. Work that is launched later does not delay it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values = tensor
        self._arrived = None
        if tensor.is_cuda:
            self._values = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[list[float]]:
        """Wait for the copy and return the numbers of each row."""
        if self._arrived is not None:
            self._arrived.synchronize()
        rows: list[list[float]] = self._values.tolist()
        return rows
