"""Modes without predictions where workers have one role: a prefill worker for each prompt."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

from msgspec.structs import replace

from dynamo.core.context import Context
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.settings.schema_router import BASIC_MODES, DisaggregationSettings, RouterSettings
from dynamo.core.values import GenerateRequest
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.load_balancing import resolve_mode_alias
from dynamo.scheduling.router.costs.pair_price import OFF, THRESHOLDS
from dynamo.scheduling.router.features import exceeds_thresholds
from dynamo.scheduling.router.policy import Decision, Policy

FALLBACK_MODE = "least_loaded"
"""The choice among prefill workers in modes that are no load-balancing mode of the client."""


class PrefillPolicy:
    """Let another policy choose the worker that decodes, and choose the worker that computes the
    prompt among the instances of `prefill_client` by the same load-balancing mode. Without such an
    instance, the decode worker computes the prompt. All else is that of the other policy."""

    def __init__(self, policy: Policy, prefill_client: Client, settings: RouterSettings) -> None:
        self._policy = policy
        self._client = prefill_client
        mode = resolve_mode_alias(settings.mode)
        self._mode = mode if mode in BASIC_MODES else FALLBACK_MODE
        self._stop_listening = prefill_client.on_change(self._skip_without_prefill)
        self._update(settings.disaggregation)

    async def choose(
        self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
    ) -> Decision:
        decision = await self._policy.choose(request, context, tried)
        prompt_tokens = len(request.token_ids) // TOKEN_BYTES
        if self._disaggregation.effective_mode == THRESHOLDS:
            pending = sum(map(self._client.in_flight, self._client.instances))
            if not exceeds_thresholds(self._disaggregation, prompt_tokens, pending):
                return decision
        allowed = self._client.instances.keys() - tried
        if not allowed:
            return decision
        return replace(decision, prefill=self._client.pick(self._mode, allowed))

    async def close(self) -> None:
        self._stop_listening()
        await self._policy.close()

    def __getattr__(self, name: str) -> Any:
        """Return what the other policy has, such as the requests that it holds."""
        return getattr(self._policy, name)

    def update_settings(self, settings: RouterSettings) -> None:
        self._policy.update_settings(settings)
        self._update(settings.disaggregation)

    def _update(self, settings: DisaggregationSettings) -> None:
        self._disaggregation = settings
        self._skip_without_prefill()

    def _skip_without_prefill(self) -> None:
        """Let the other policy choose alone while no prompt can be computed elsewhere, so that
        plain deployments pay nothing for this one."""
        skip = not self._client.instances or self._disaggregation.effective_mode == OFF
        choose = self._policy.choose if skip else partial(PrefillPolicy.choose, self)
        self.choose = choose  # type: ignore[method-assign]
