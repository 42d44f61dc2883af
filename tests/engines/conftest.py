"""Tests on engines that are really installed (`make test-engines`). A start takes half a minute, so
only one engine runs at a time, and the tests of a file share it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

MODEL_VARIABLE = "DYNAMO_TEST_ENGINE_MODEL"
START_TIMEOUT_S = 1800.0
FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them where no engine is installed for them."""
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(START_TIMEOUT_S))
            item.add_marker(pytest.mark.filterwarnings("default"))  # warnings of an engine
            if MODEL_VARIABLE not in os.environ:
                item.add_marker(pytest.mark.skip("needs real engines: make test-engines"))


@pytest.fixture(scope="session")
def engine_model() -> Path:
    """The default model as a Hugging Face folder in float32."""
    return Path(os.environ[MODEL_VARIABLE]).absolute()
