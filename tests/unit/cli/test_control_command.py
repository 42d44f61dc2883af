"""The requests that `dynamo restart` and its siblings send."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo.cli.control import DRAIN, RESTART, SCALE, ControlCommand
from dynamo.runtime import deployment
from dynamo.runtime.deployment import Deployment
from dynamo.runtime.processes import control
from dynamo.runtime.processes.control import ControlRequest


@pytest.mark.parametrize(
    ("command", "arguments", "request_sent"),
    [
        (RESTART, [], ControlRequest("restart", "")),
        (RESTART, ["frontend"], ControlRequest("restart", "frontend")),
        (DRAIN, ["worker-2"], ControlRequest("drain", "worker-2")),
        (SCALE, ["worker=5"], ControlRequest("scale", "worker", 5)),
    ],
)
def test_a_command_sends_its_target(
    command: ControlCommand,
    arguments: list[str],
    request_sent: ControlRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[ControlRequest] = []

    def send(request: ControlRequest, *_: Any) -> Iterator[str]:
        sent.append(request)
        return iter(())

    running = [Deployment("http-8000", Path("/nowhere"))]
    monkeypatch.setattr(deployment, "live_deployments", lambda: running)
    monkeypatch.setattr(control, "send_control_request", send)
    assert command.run(arguments) == 0
    assert sent == [request_sent]
