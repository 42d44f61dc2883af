"""Errors with which a process ends and that a restart cannot fix."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo.core.errors import (
    ConfigError,
    DynamoError,
    ModelUnavailable,
    Unsupported,
    WorkerFailed,
)
from dynamo.runtime.processes import process


class Parent:
    """Keeps the reports of a process."""

    def __init__(self) -> None:
        self.fatal: list[str] = []

    def send_report(self, report: Any) -> None:
        self.fatal.append(report.fatal)


@pytest.mark.parametrize("kind", [ConfigError, ModelUnavailable, Unsupported])
def test_errors_that_no_restart_fixes_are_told_to_the_supervisor(kind: type[DynamoError]) -> None:
    parent: Any = Parent()
    process.report_failure(kind("the engine does not serve it"), parent)
    assert parent.fatal == ["the engine does not serve it"]


def test_other_errors_are_left_to_a_restart() -> None:
    parent: Any = Parent()
    assert process.report_failure(WorkerFailed("the server is gone"), parent) == 1
    assert parent.fatal == []
