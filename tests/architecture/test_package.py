"""The wheel and the source distribution say what they are and point to no file that they lack."""

from __future__ import annotations

import ast
import posixpath
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "from setuptools import build_meta as b; b.build_sdist('out'); b.build_wheel('out')"
UNTRACKED = (".git", ".venv*", "*_cache", ".hypothesis", "node_modules", "__pycache__", "build")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)")
FILE = re.compile(r"\b(?:docs|examples|configs|deploy|benchmarks|scripts)/\w")
"""A file of this repository in a text. A wheel has none of these folders."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the wheel and the source distribution."""
    copy = tmp_path_factory.mktemp("package") / "source"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*UNTRACKED, "*.egg-info", "dist"))
    subprocess.run([sys.executable, "-c", BUILD], cwd=copy, check=True, capture_output=True)
    return copy / "out"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Mapping[str, bytes]:
    """Return the files of the wheel by name."""
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_package_names_its_authors_and_its_kind(wheel: Mapping[str, bytes]) -> None:
    (name,) = (name for name in wheel if name.endswith(".dist-info/METADATA"))
    metadata = message_from_bytes(wheel[name])

    assert metadata["Author"] or metadata["Author-email"]
    assert metadata.get_all("Project-URL")
    assert len(metadata.get_all("Classifier", [])) > 5
    assert "dynamo run" in str(metadata.get_payload())
    assert LINK.findall(str(metadata.get_payload())) == []


def test_the_wheel_has_the_pages_and_names_no_file_that_it_lacks(
    wheel: Mapping[str, bytes],
) -> None:
    console = "dynamo/application/console/static"
    assert {
        "dynamo/application/front_page.html",
        *(f"{console}/{name}" for name in ("console.html", "console.css", "main.js")),
    } <= {*wheel}
    texts = [
        (name, text)
        for name in wheel
        if name.endswith(".py")
        for text in shown_texts(wheel[name].decode())
        if FILE.search(text)
    ]
    assert texts == []


def shown_texts(source: str) -> Iterator[str]:
    """Yield the texts of a module that users can see: all but docstrings."""
    for node in ast.walk(ast.parse(source)):
        for child in ast.iter_child_nodes(node):
            is_text = isinstance(child, ast.Constant) and isinstance(child.value, str)
            if is_text and not isinstance(node, ast.Expr):
                yield child.value


def test_the_source_distribution_has_what_its_pages_link_to(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers()}
        pages = {
            name: archive.extractfile(f"{path.name.removesuffix('.tar.gz')}/{name}")
            for name in names
            if name.endswith(".md")
        }
        texts = {name: file.read().decode() for name, file in pages.items() if file is not None}
    assert {"README.md", "docs/tutorial.md", "examples/traces/README.md"} <= {*texts}
    missing = [
        (name, target)
        for name, text in texts.items()
        for target in LINK.findall(text)
        if posixpath.normpath(posixpath.join(posixpath.dirname(name), target)) not in names
    ]
    assert missing == []
