"""Fixtures of the attacks: one deployment with default settings, and a log of their outcomes.

Each test is an attack of a client, a web page or another user of the host on real processes. A test
marked `attack("what is tried", "what must hold")` reports what came of it by `outcome("...")`.
`make faults` writes these rows into docs/faults.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.faults.cluster import Cluster

ROWS_VARIABLE = "DYNAMO_ATTACK_ROWS"


@pytest.fixture(scope="session")
def deployment(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A frontend and two mock workers with default settings. Attacks leave it as they found it."""
    with Cluster(tiny_model, tmp_path_factory.mktemp("attacked"), workers=2) as cluster:
        yield cluster


@pytest.fixture
def outcome(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Record the outcome of the test's attack as a row of docs/faults.md."""
    attack, expected = request.node.get_closest_marker("attack").args

    def record(text: str) -> None:
        if path := os.environ.get(ROWS_VARIABLE):
            with Path(path).open("a") as rows:
                rows.write(json.dumps([attack, expected, text]) + "\n")

    return record
