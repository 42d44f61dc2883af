"""The layers, and the one home of every library: import-linter's contracts hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stdout
    assert " 0 broken" in ended.stdout


def test_importing_dynamo_loads_nothing_heavy() -> None:
    program = (
        "import sys, dynamo, dynamo.cli, dynamo_client\n"
        "heavy = {'numpy', 'tokenizers', 'fastokens', 'jinja2', 'uvloop', 'httptools', 'yaml',\n"
        "         'huggingface_hub', 'asyncio'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)

    assert ended.stdout.strip() == "[]"


def test_the_supervisor_loads_no_engine_and_no_tokenizer() -> None:
    program = (
        "import sys, dynamo.cli.run, dynamo.services.launch, dynamo.models.resolve\n"
        "heavy = {'numpy', 'tokenizers', 'fastokens', 'jinja2', 'uvloop', 'huggingface_hub'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)

    assert ended.stdout.strip() == "[]"
