"""The package's names load their modules on first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dynamo.runtime


@pytest.mark.parametrize("name", dynamo.runtime.__all__)
def test_every_public_name_is_there(name):
    assert getattr(dynamo.runtime, name).__name__ == name or name == "State"


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        dynamo.runtime.Nonsense  # noqa: B018


def test_who_only_looks_at_what_runs_loads_no_client_and_no_loop():
    """`dynamo ps` and `dynamo stop`."""
    program = (
        "import sys; from dynamo.runtime.deployment import live_processes; live_processes();"
        "print([one for one in ('asyncio', 'dynamo.communication') if one in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert ran.stdout.strip() == b"[]"
