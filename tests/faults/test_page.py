"""docs/faults.md: rows of attacks come from their tests, and each part is written on its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
ATTACKS = """
import pytest

@pytest.mark.attack("a long body", "others go on")
@pytest.mark.parametrize("size", [1, 2])
def test_body(size, outcome):
    outcome(f"size {size}: nothing|happened")

@pytest.mark.attack("a page", "403")
def test_page(outcome):
    outcome("403")
    assert not "the page was answered"

@pytest.mark.attack("another user", "nothing")
def test_user():
    pytest.skip("needs root")

@pytest.mark.attack("a fixture that fails", "nothing")
def test_fixture(missing):
    pass

def test_without_a_row():
    pass
"""


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("faults_script", ROOT / "scripts" / "faults.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec.loader.exec_module(module)
    module.PAGE = tmp_path / "faults.md"
    return module


def test_attacks_that_pass_fail_or_are_skipped_have_a_row(tmp_path: Path) -> None:
    file, rows = tmp_path / "test_them.py", tmp_path / "rows"
    file.write_text(ATTACKS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.attacks.conftest",
        "-c",
        "pyproject.toml",
    ]
    environ = os.environ | {"DYNAMO_ATTACK_ROWS": str(rows)}
    ended = subprocess.run([*command, str(file)], cwd=ROOT, env=environ, capture_output=True)

    assert ended.returncode == 1, ended.stdout
    texts = [json.loads(line) for line in rows.read_text().splitlines()]
    assert texts[:2] == [
        ["a long body", "others go on", "size 1: nothing|happened"],
        ["a long body", "others go on", "size 2: nothing|happened"],
    ]
    assert [text[0] for text in texts[2:]] == ["a page", "another user", "a fixture that fails"]
    assert texts[2][2].startswith("**failed:** assert not")
    assert texts[3][2] == "not tried: needs root"
    assert texts[4][2].startswith("**failed:** ")


def test_either_part_of_the_page_is_kept(faults: ModuleType) -> None:
    faults.PAGE.write_text("# Faults\n\nfirst\n")
    faults.write_page(attacks=f"{faults.ATTACKS_TITLE}\none\n")
    assert faults.PAGE.read_text() == f"# Faults\n\nfirst\n\n{faults.ATTACKS_TITLE}\none\n"

    faults.write_page(attacks=f"{faults.ATTACKS_TITLE}\ntwo\n")
    faults.write_page(faults="# Faults\n\nsecond\n")
    assert faults.PAGE.read_text() == f"# Faults\n\nsecond\n\n{faults.ATTACKS_TITLE}\ntwo\n"


def test_a_row_of_several_cases_shows_those_that_failed(
    faults: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_attacks(command: list[str], env: dict[str, str], **_: object) -> object:
        rows = [("a", "b", "one | two"), ("c", "d", "three"), ("a", "b", "**failed:** four")]
        Path(env["DYNAMO_ATTACK_ROWS"]).write_text("\n".join(map(json.dumps, rows)))
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(faults.subprocess, "run", run_attacks)
    page, held = faults.attack()

    assert not held
    assert "| a | b | **failed:** four |\n| c | d | three |\n" in page
