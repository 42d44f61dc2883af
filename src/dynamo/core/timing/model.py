"""Models of the time that a step of an engine takes, by counts. Times are in milliseconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec

from dynamo.core.errors import ConfigError

QUADRATIC_COEFFICIENTS = 3
_NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]


class StepCounts(Protocol):
    """The work of one step.

    - `new_tokens`: prompt tokens to compute; `seqs`: sequences in the batch.
    - `decode_seqs`: those that decode a single token; `decode_context`: their total length.
    - `attention`: pairs of tokens that prompts attend to: for each chunk of a prompt its length
      times the tokens before it and half of its own.
    """

    @property
    def new_tokens(self) -> int: ...
    @property
    def seqs(self) -> int: ...
    @property
    def decode_seqs(self) -> int: ...
    @property
    def decode_context(self) -> int: ...
    @property
    def attention(self) -> float: ...


class Counts(msgspec.Struct, frozen=True):
    """The counts of a step that is known by nothing else (a `StepCounts`)."""

    new_tokens: int
    seqs: int
    decode_seqs: int
    decode_context: int
    attention: float


class PolynomialTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="polynomials"):
    """Step time as a sum of two polynomials, with coefficients from the lowest degree up. `prefill`
    is applied to the number of new prompt tokens, if any. `decode` is applied to the context of the
    decoding sequences as a share of the KV capacity, if any."""

    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    floor_ms: _NonNegativeFloat = 1.0

    def step_ms(self, counts: StepCounts, capacity_tokens: int) -> float:
        """Return the time of one step."""
        step_ms = 0.0
        if counts.new_tokens:
            step_ms = evaluate_polynomial(self.prefill, counts.new_tokens)
        if counts.decode_seqs:
            step_ms += evaluate_polynomial(self.decode, counts.decode_context / capacity_tokens)
        return max(step_ms, self.floor_ms)

    def decode_ms(self, seqs: int, contexts: Any, capacity_tokens: int) -> Any:
        """Return the times of steps that only decode `seqs` sequences, an array like `contexts`,
        the sums of their lengths in each of the steps."""
        del seqs
        return evaluate_polynomial(self.decode, contexts / capacity_tokens).clip(self.floor_ms)


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="linear"):
    """Step time: c0 + c1 * new prompt tokens + c2 * sequences + c3 * context that is decoded
    + c4 * attention of prompts (see `StepCounts`)."""

    c0: _NonNegativeFloat
    c1: _NonNegativeFloat
    c2: _NonNegativeFloat = 0.0
    c3: _NonNegativeFloat = 0.0
    c4: _NonNegativeFloat = 0.0

    def step_ms(self, counts: StepCounts, capacity_tokens: int) -> float:
        """Return the time of one step."""
        del capacity_tokens
        batch = self.c2 * counts.seqs + self.c3 * counts.decode_context
        step_ms = self.c0 + self.c1 * counts.new_tokens + batch
        return step_ms + self.c4 * counts.attention if self.c4 else step_ms

    def decode_ms(self, seqs: int, contexts: Any, capacity_tokens: int) -> Any:
        """Return the times of steps that only decode; see `PolynomialTiming.decode_ms`."""
        del capacity_tokens
        return self.c0 + self.c2 * seqs + self.c3 * contexts


StepTiming = PolynomialTiming | Timing
"""A model of an engine's speed. `capacity_tokens` is the size of its KV cache."""

DYNAMO_TIMING = PolynomialTiming(
    prefill=(16.50142, 1.518344e-2, 4.209989e-7), decode=(5.74, 54.01, -25.74), floor_ms=1.0
)
"""The defaults of the mock engine of NVIDIA Dynamo 1.6.1."""


def evaluate_polynomial(coefficients: Sequence[float], x: Any) -> Any:
    """Evaluate a polynomial whose coefficients start with the lowest degree, at a number or for
    each number of an array."""
    value = 0.0 * x
    for coefficient in reversed(coefficients):
        value = value * x + coefficient
    return value


def parse_timing(text: str) -> StepTiming:
    """Parse the setting `timing`. Accepts `dynamo`, `constant:MS_PER_PROMPT_TOKEN,MS_PER_STEP`, or
    the path of a JSON file that holds {"type": "linear", c0, c1, c2, c3, c4} or
    {"type": "polynomials", prefill, decode, floor_ms}. Raises `ConfigError`."""
    if text in {"", "dynamo"}:
        return DYNAMO_TIMING
    if text.startswith("constant:"):
        return parse_constant_timing(text.removeprefix("constant:"))
    try:
        return msgspec.json.decode(Path(text).read_bytes(), type=Timing | PolynomialTiming)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"timing {text!r}: {error}",
            hint="use dynamo, constant:MS_PER_PROMPT_TOKEN,MS_PER_STEP, or the path of a JSON file",
        ) from error


def parse_constant_timing(text: str) -> Timing:
    """Parse `MS_PER_PROMPT_TOKEN,MS_PER_STEP`. Raises `ConfigError`."""
    try:
        per_token, per_step = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"timing 'constant:{text}': expected two numbers",
            hint="e.g. constant:0.02,5 for 0.02 ms a prompt token and 5 ms a step",
        ) from None
    if not (0 <= per_token < math.inf and 0 <= per_step < math.inf):
        raise ConfigError(f"timing 'constant:{text}': times must be finite and not negative")
    return Timing(c0=per_step, c1=per_token)
