"""The page of look-ups names files, classes and functions that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def rows() -> list[tuple[str, str]]:
    """File and qualified name of every row of docs/look-ups.md."""
    lines = (ROOT / "docs" / "look-ups.md").read_text().splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if "| `" in line
    ]
    return [(file.strip("`"), name.strip("`")) for _, file, name in cells]


def defined_names(path: Path) -> set[str]:
    """Classes, functions, constants and methods of a module, methods as `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
            names |= {
                f"{node.name}.{member.name}"
                for member in getattr(node, "body", [])
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return names


def test_the_page_has_at_least_twenty_look_ups() -> None:
    assert len(rows()) >= 20


def test_no_behaviour_stands_twice() -> None:
    lines = (ROOT / "docs" / "look-ups.md").read_text().splitlines()
    behaviours = [line.split("|")[1] for line in lines if "| `" in line]

    assert sorted(set(behaviours)) == sorted(behaviours)


@pytest.mark.parametrize(("file", "name"), rows())
def test_the_named_file_defines_the_named_thing(file: str, name: str) -> None:
    assert name in defined_names(ROOT / "src" / "dynamo" / file)
