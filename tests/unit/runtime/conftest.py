"""Fixtures for supervisors with tiny scripts as children."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from dynamo.core.settings import Settings
from dynamo.runtime.deployment import Deployment
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.supervisor import Supervisor


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return Deployment("test", tmp_path / "test")


CHILD = """
import json, os, signal, sys, time
start = json.loads(os.read(0, 1 << 20))
tell = lambda **report: os.write(0, json.dumps(report).encode() + b"\\n")
"""


@pytest.fixture
def spec() -> Callable[..., ChildSpec]:
    """`spec(script, name=...)`: a child that runs `script` after reading its start line."""

    def make(
        script: str, name: str = "child", stop_order: int = 0, role: str = "worker"
    ) -> ChildSpec:
        return ChildSpec(
            role=role,
            name=name,
            settings=Settings(),
            stop_order=stop_order,
            command=(sys.executable, "-S", "-c", CHILD + script),
        )

    return make


@pytest.fixture
def supervise(deployment: Deployment) -> Callable[..., Supervisor]:
    """`supervise(*specs)`: a supervisor of the test's own deployment."""

    def make(*specs: ChildSpec, drain_s: float = 5.0, **options: object) -> Supervisor:
        settings = Settings()
        url = deployment.discovery_url
        runtime = replace(settings.runtime, drain_s=drain_s, discovery=url)
        settings = replace(settings, runtime=runtime)
        return Supervisor(specs, deployment, settings, **options)  # type: ignore[arg-type]

    return make
