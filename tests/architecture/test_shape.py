"""Sizes and names: scripts/check_shape.py finds what is wrong. `make check` runs it on the project."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = '[project]\ndependencies = ["msgspec>=0.20", "pyyaml"]\n'


def check(root: Path) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "scripts" / "check_shape.py"), str(root)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def test_every_breach_is_reported(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    package = tmp_path / "src" / "dynamo" / "utils"
    package.mkdir(parents=True)
    (package / "long.py").write_text("\n" * 401)
    (package / "one.py").write_text(
        "import yaml, msgspec, json, requests\n"
        "import asyncio\n"
        "asyncio.create_task(1)\n"
        "def f():\n" + "    x = 1\n" * 50 + "key = {id(f): f, f.id(): f}\n"
    )

    crowded = tmp_path / "src" / "dynamo" / "crowded"
    crowded.mkdir()
    for number in range(22):
        (crowded / f"module_{number}.py").touch()
    (crowded / "__init__.py").touch()

    code, out = check(tmp_path)

    assert code == 1
    assert "long.py: 401 lines" in out
    assert "nothing is called 'utils'" in out
    assert "one.py:1: requests is no declared dependency" in out
    assert "one.py:3: create_task belongs to core/tasks.py" in out
    assert "one.py:4: f has 51 lines" in out
    assert "one.py:55: id() is no key" in out
    assert "src/dynamo/crowded: 23 modules, and docs/glossary.md has no noun" in out
    assert len(out.splitlines()) == 8


def test_a_file_of_the_list_may_be_longer(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    store = tmp_path / "src" / "dynamo" / "application" / "responses" / "store.py"
    store.parent.mkdir(parents=True)

    results = []
    for lines in (400, 401, 600, 601):
        store.write_text("\n" * lines)
        results.append(check(tmp_path))

    short, long = "store.py: at most 400 lines", "store.py: 601 lines, at most 600"
    assert [code for code, _ in results] == [1, 0, 0, 1]
    assert short in results[0][1]
    assert long in results[3][1]
