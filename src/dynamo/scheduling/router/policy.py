"""How an instance is chosen: the interface, and the modes that know nothing of what a worker
holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set as AbstractSet

import msgspec

from dynamo.core.context import Context
from dynamo.core.values import GenerateRequest
from dynamo.runtime.client import Client
from dynamo.runtime.instances import Instance
from dynamo.runtime.picks import mode_name


class Decision(msgspec.Struct, frozen=True):
    """One choice. `candidates`: how many instances it was made among."""

    instance: Instance
    mode: str
    candidates: int


class Policy(ABC):
    """Chooses; asynchronous, because a policy may let a request wait for a better moment."""

    @abstractmethod
    async def choose(
        self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
    ) -> Decision:
        """One instance that is not in `tried` (ids). Raises `NoWorkers`."""


class BasicPolicy(Policy):
    """The LLM-free picks of the runtime's client."""

    def __init__(self, client: Client, mode: str) -> None:
        """`mode` as settings have it, `-` and `_` alike. Raises ConfigError for another."""
        self._client = client
        self._mode = mode_name(mode)

    async def choose(
        self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
    ) -> Decision:
        del request, context
        live = self._client.instances
        if not tried:
            return Decision(self._client.pick(self._mode), self._mode, len(live))
        allowed = live.keys() - tried
        return Decision(self._client.pick(self._mode, allowed), self._mode, len(allowed))
