"""The package's names load their modules on first use."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import dynamo.runtime


@pytest.mark.parametrize("name", dynamo.runtime.__all__)
def test_every_public_name_can_be_loaded(name):
    assert getattr(dynamo.runtime, name).__name__.removeprefix("Compat") == name


def test_an_unknown_name_raises_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        dynamo.runtime.Nonsense  # noqa: B018


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("dynamo._core", "Client Component Context DistributedRuntime Endpoint Namespace"),
        ("dynamo._prometheus_metrics", "Gauge IntCounter IntGauge IntGaugeVec RuntimeMetrics"),
        ("dynamo.prometheus_metrics", "Counter CounterVec GaugeVec Histogram IntCounterVec"),
        ("dynamo.llm", "ModelInput ModelType HttpError HttpService register_llm RouterConfig"),
        ("dynamo.llm.exceptions", "HttpError InvalidArgument EngineShutdown DynamoException"),
    ],
)
def test_names_of_nvidia_dynamo_can_be_imported(module: str, names: str) -> None:
    loaded = importlib.import_module(module)
    assert all(getattr(loaded, name) for name in names.split())


def test_listing_processes_imports_neither_asyncio_nor_planes():
    """`dynamo ps` and `dynamo stop` start quickly because of this."""
    program = (
        "import sys; from dynamo.runtime import deployment;"
        "deployment.state_roots = lambda _: [];"  # a dead deployment would be removed
        "deployment.live_processes();"
        "print([name for name in ('asyncio', 'dynamo.communication') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert ran.stdout.strip() == b"[]"
