"""The package's names load their modules on first use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import dynamo.runtime


@pytest.mark.parametrize("name", dynamo.runtime.__all__)
def test_every_public_name_can_be_loaded(name):
    assert getattr(dynamo.runtime, name).__name__ == name


def test_an_unknown_name_raises_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        dynamo.runtime.Nonsense  # noqa: B018


def test_listing_processes_imports_neither_asyncio_nor_planes(tmp_path):
    """`dynamo ps` and `dynamo stop` start quickly because of this."""
    program = (
        "import sys; from dynamo.runtime.deployment import live_processes; live_processes();"
        "print([name for name in ('asyncio', 'dynamo.communication') if name in sys.modules])"
    )
    environ = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, check=True, env=environ)
    assert ran.stdout.strip() == b"[]"
