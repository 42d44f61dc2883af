"""Imports of a first module load nothing heavy. `make check` holds the contracts of layers."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"numpy", "tokenizers", "fastokens", "jinja2", "uvloop", "huggingface_hub"}


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("dynamo, dynamo.cli, dynamo_client", HEAVY | {"httptools", "yaml", "asyncio"}),
        ("dynamo.cli.run, dynamo.services.deployment.launch, dynamo.models.resolve", HEAVY),
    ],
    ids=["the package", "the supervisor"],
)
def test_importing_loads_nothing_heavy(modules: str, heavy: set[str]) -> None:
    program = f"import sys, {modules}; print(sorted({heavy} & set(sys.modules)))"
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)

    assert ended.stdout.strip() == "[]"
