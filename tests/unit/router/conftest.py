"""Processes in mode kv."""

from __future__ import annotations

import pytest

from dynamo.core.settings import Settings
from dynamo.core.settings.schema_router import RouterSettings


@pytest.fixture
def process_settings() -> Settings:
    return Settings(router=RouterSettings(mode="kv"))
