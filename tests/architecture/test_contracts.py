"""The layers, and the one home of every library: import-linter's contracts hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stdout
    assert " 0 broken" in ended.stdout


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
