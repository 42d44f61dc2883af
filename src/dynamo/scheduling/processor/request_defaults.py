"""Defaults for values that a request omits.

Precedence: request, configuration, the engine's own values (foreign engines apply the model's
generation_config to theirs), the model's generation_config, the constants below.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from dynamo.core.errors import ContextLengthExceeded, InvalidRequest
from dynamo.core.settings.schema import SamplingSettings
from dynamo.core.text import SamplingOverrides, TextOptions
from dynamo.core.values import SamplingParams

DEFAULT_SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 50}
SEED_BITS = 63

_SAMPLING_NAMES = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_NO_OVERRIDES = SamplingOverrides()


class RequestDefaults:
    """The defaults of one model. `sampling` holds those of sampling."""

    def __init__(
        self,
        configured: SamplingSettings,
        generation: Mapping[str, Any],
        context_tokens: int,
        rng: Random,
        engine: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`generation`: the model's defaults; `engine`: `EngineInfo.sampling`."""
        self._default_values: dict[str, Any] = {**DEFAULT_SAMPLING}
        settings = {name: getattr(configured, name) for name in DEFAULT_SAMPLING}
        for source in (generation, engine, settings):
            for name in _SAMPLING_NAMES:
                if (value := source.get(name)) is not None:
                    self._default_values[name] = value
        self._default_values["top_k"] = max(0, int(self._default_values["top_k"]))
        self.sampling = SamplingParams(**self._default_values)
        of_engine = int(engine.get("max_tokens") or 0)
        of_model = of_engine or generation.get("max_new_tokens") or context_tokens
        self._max_tokens = configured.max_tokens or of_model
        self._context_tokens = context_tokens
        self._random_bits = rng.getrandbits

    def resolve_sampling(self, overrides: SamplingOverrides) -> SamplingParams:
        """Return the defaults with all overrides that are not None. The default seed is random."""
        if overrides == _NO_OVERRIDES:
            seed = self._random_bits(SEED_BITS)
            return replace(self.sampling, seed=seed, random_seed=True)
        values = self._default_values.copy()
        for name in overrides.__struct_fields__:
            value = getattr(overrides, name)
            if value is not None:
                values[name] = value
        if "seed" not in values:
            seed = self._random_bits(SEED_BITS)
            return SamplingParams(seed=seed, random_seed=True, **values)
        return SamplingParams(**values)

    def resolve_max_tokens(self, options: TextOptions, prompt_tokens: int) -> int:
        """Return the answer's maximum length, at most what the prompt leaves of the context.

        Raises ContextLengthExceeded when the prompt leaves nothing. Raises InvalidRequest for an
        empty prompt, and for `min_tokens` above the request's own maximum.
        """
        if prompt_tokens == 0:
            raise InvalidRequest("the prompt is empty", param="prompt")
        context, wanted = self._context_tokens, options.max_tokens
        left = context - prompt_tokens
        if left < (1 if wanted is None else min(wanted, 1)):
            raise ContextLengthExceeded(
                f"this model's context is {context} tokens, and the prompt alone has "
                f"{prompt_tokens}",
                hint="shorten the prompt and leave room for the answer",
                param="prompt",
            )
        tokens = min(self._max_tokens if wanted is None else wanted, left)
        if options.min_tokens > (tokens if wanted is None else wanted):
            raise InvalidRequest(
                f"min_tokens {options.min_tokens} is above the answer's maximum of {tokens} tokens",
                param="min_tokens",
            )
        return tokens
