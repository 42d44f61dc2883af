"""uvloop for test classes named `...Uvloop`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

Factories = dict[str, Callable[[], asyncio.AbstractEventLoop]]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Factories:
    owner = item.getparent(pytest.Class)
    if owner is not None and owner.name.endswith("Uvloop"):
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
