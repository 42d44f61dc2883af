"""The suites are a library: have their asserts explained like those of tests. A test class whose
name ends in `Uvloop` runs on that loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

for seam in ("discovery", "requests", "events"):
    pytest.register_assert_rewrite(f"dynamo.testing.conformance.{seam}")

Factories = dict[str, Callable[[], asyncio.AbstractEventLoop]]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Factories:
    owner = item.getparent(pytest.Class)
    if owner is not None and owner.name.endswith("Uvloop"):
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
