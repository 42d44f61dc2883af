"""Conformance tests for every connector of the planner."""
# ruff: noqa: S101

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from dynamo.core.errors import DynamoError
from dynamo.operations.planner.connectors.connector import Connector
from dynamo.operations.planner.values import KindState, Order

UNTIL_STEPS = 2000

Settle = Callable[[], Awaitable[None]]
"""Lets the deployment go on for a moment: real time, or a step of a simulated clock."""


class ConnectorConformance:
    """A subclass defines the fixtures `connector`, whose deployment has two ready workers of the
    kind `worker`, and `settle`."""

    async def until(
        self, connector: Connector, settle: Settle, condition: Callable[[KindState], bool]
    ) -> KindState:
        """Return the state of the workers as soon as it is so."""
        for _ in range(UNTIL_STEPS):
            state = (await connector.observe())["worker"]
            if condition(state):
                return state
            await settle()
        raise AssertionError(f"the workers are still {state}")

    async def test_it_sees_what_is_there(self, connector: Connector) -> None:
        """Kinds have sizes, and what a worker holds."""
        state = (await connector.observe())["worker"]
        assert (state.wanted, state.ready, state.starting, state.draining) == (2, 2, 0, 0)
        assert state.gpus == 1
        assert state.role == "both"
        assert not state.failing

    async def test_an_order_shows_at_once_and_is_carried_out(
        self, connector: Connector, settle: Settle
    ) -> None:
        """`wanted` changes before workers serve."""
        await connector.scale(Order(1, "worker", 3, "more load"))
        await self.until(connector, settle, lambda state: state.wanted == 3)
        state = await self.until(connector, settle, lambda state: state.ready == 3)
        assert state.starting == 0
        await connector.scale(Order(2, "worker", 1, "less load"))
        await self.until(connector, settle, lambda state: state.wanted == 1)
        await self.until(connector, settle, lambda state: (state.ready, state.draining) == (1, 0))

    async def test_an_order_that_is_given_twice_changes_nothing(
        self, connector: Connector, settle: Settle
    ) -> None:
        """Sizes are absolute, and a number is carried out once."""
        order = Order(1, "worker", 3, "more load")
        await connector.scale(order)
        await connector.scale(order)
        await self.until(connector, settle, lambda state: state.wanted == 3)
        await connector.scale(Order(2, "worker", 2, "less load"))
        await self.until(connector, settle, lambda state: state.wanted == 2)
        await connector.scale(order)
        for _ in range(5):
            await settle()
            assert (await connector.observe())["worker"].wanted == 2

    async def test_a_kind_goes_to_nothing_and_back(
        self, connector: Connector, settle: Settle
    ) -> None:
        """A kind without workers is seen, and can grow."""
        await connector.scale(Order(1, "worker", 0, "no load"))
        await self.until(connector, settle, lambda state: (state.wanted, state.ready) == (0, 0))
        await connector.scale(Order(2, "worker", 1, "load"))
        await self.until(connector, settle, lambda state: state.ready == 1)

    async def test_an_unknown_kind_is_refused(self, connector: Connector) -> None:
        """The error names what is unknown."""
        with pytest.raises(DynamoError, match="nothing"):
            await connector.scale(Order(1, "nothing", 1, ""))
