"""Fixtures of the attacks: one deployment with default settings, and a log of their outcomes.

Each test is an attack of a client, a web page or another user of the host on real processes. A test
marked `attack("what is tried", "what must hold")` reports what came of it by `outcome("...")`.
`make faults` writes these rows into docs/faults.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from tests.faults.cluster import Cluster

ROWS_VARIABLE = "DYNAMO_ATTACK_ROWS"
OUTCOME = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def deployment(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A frontend and two mock workers with default settings. Attacks leave it as they found it."""
    with Cluster(tiny_model, tmp_path_factory.mktemp("attacked"), workers=2) as cluster:
        yield cluster


@pytest.fixture
def outcome(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Record the outcome of the test's attack for its row of docs/faults.md."""

    def record(text: str) -> None:
        request.node.stash[OUTCOME] = text

    return record


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Append a row for each marked test, also for those that fail or are skipped."""
    report = yield
    marker = item.get_closest_marker("attack")
    path = os.environ.get(ROWS_VARIABLE)
    if marker and path and (report.when == "call" or not report.passed):
        attack, expected = marker.args
        text = item.stash.get(OUTCOME, "holds")
        if report.failed:
            text = f"**failed:** {_first_line(call)}"
        elif report.skipped:
            text = f"not tried: {_first_line(call)}"
        with Path(path).open("a") as rows:
            rows.write(json.dumps([attack, expected, text]) + "\n")
    return report


def _first_line(call: pytest.CallInfo[None]) -> str:
    error = call.excinfo.value if call.excinfo else None
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return (str(error) or type(error).__name__).splitlines()[0][:200]
