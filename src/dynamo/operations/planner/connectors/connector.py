"""The interface between the planner and what runs workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from dynamo.operations.planner.values import KindState, Order


class Connector(ABC):
    """Observes and changes the workers of a deployment."""

    @abstractmethod
    async def observe(self) -> Mapping[str, KindState]:
        """Return all kinds of workers. An order that was accepted shows in `wanted` at once. Raises
        `DynamoError` if the deployment cannot be seen."""

    @abstractmethod
    async def scale(self, order: Order) -> None:
        """Accept an order. Returns before workers start or drain. An order whose number was
        accepted before changes nothing. Raises `DynamoError` if it cannot be carried out, such as
        `NotFound` for an unknown kind."""

    async def close(self) -> None:
        """Release what the connector holds."""
        return
