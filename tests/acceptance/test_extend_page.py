"""The recipes of docs/how-to/extend.md, each done as the page says.

Blocks with `file=` become files. Blocks with `add=` change a copy of the source: they stand after,
before or instead of the line that begins with the given text. Packages are installed as pip would do: their entry
points stand in a dist-info folder.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Deployment

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r'```\w+ (file|add)=(\S+)(?: (after|before|replace)="([^"]+)")?\n(.*?)```', re.DOTALL
)


def edit(text: str, how: str, beginning: str, code: str) -> str:
    """Put `code` after, before or instead of the first line that begins with `beginning`.

    After the head of a class means after its docstring.
    """
    lines = text.split("\n")
    at = next(i for i, line in enumerate(lines) if line.strip().startswith(beginning))
    if how == "after":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.lineno == at + 1:
                at = (node.body[0].end_lineno or at) - 1
        at += 1
    return "\n".join([*lines[:at], code.removesuffix("\n"), *lines[at + (how == "replace") :]])


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user who followed every recipe."""
    home = tmp_path_factory.mktemp("extended")
    shutil.copytree(ROOT / "src", home / "src", ignore=shutil.ignore_patterns("__pycache__"))
    packages = home / "packages"
    for kind, path, how, beginning, code in BLOCK.findall(
        (ROOT / "docs" / "how-to" / "extend.md").read_text()
    ):
        file = (home if path.startswith("src/") else packages) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code if kind == "file" else edit(file.read_text(), how, beginning, code))
    install(packages)
    path = os.pathsep.join([str(home / "src"), str(packages)])
    return {"PYTHONPATH": path, "XDG_RUNTIME_DIR": str(home)}


def install(packages: Path) -> None:
    """Write the entry points of `packages/pyproject.toml` where importlib.metadata finds them."""
    groups = tomllib.loads((packages / "pyproject.toml").read_text())["project"]["entry-points"]
    info = packages / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "\n".join(
            f"[{group}]\n" + "\n".join(f"{name} = {target}" for name, target in points.items())
            for group, points in groups.items()
        )
    )


def run(environ: dict[str, str], *words: str) -> str:
    """Run a Python command line and return what it printed."""
    ended = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=os.environ | environ
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def deployment(
    environ: dict[str, str], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """A deployment that serves the recipes' engine with the recipes' routing mode."""
    home = tmp_path_factory.mktemp("deployment")
    words = ["out=reverse", str(tiny_model), "--router-mode", "always-first", "--block-size", "32"]
    words += ["--operators", "token_cap"]
    deployment = Deployment(words, home, environ)
    try:
        deployment.wait_ready()
        yield deployment
    finally:
        deployment.stop()


def test_the_engine_and_the_routing_policy_serve_a_request(deployment: Deployment) -> None:
    status, whole = deployment.post(
        "/v1/completions", {"model": "default", "prompt": [5, 6, 7], "max_tokens": 9}
    )
    assert status == 200
    _, text = deployment.post("/detokenize", {"model": "default", "tokens": [7, 6]})
    assert whole["choices"][0]["text"] == text["prompt"]
    assert whole["usage"]["completion_tokens"] == 2


def test_the_operator_shortens_the_answer(deployment: Deployment) -> None:
    _, whole = deployment.post(
        "/v1/completions", {"model": "default", "prompt": [5, 6, 7, 8, 9], "max_tokens": 4}
    )
    assert whole["usage"]["completion_tokens"] == 2


def test_the_plane_backend_is_opened_by_its_scheme(environ: dict[str, str]) -> None:
    program = """
import asyncio
from dynamo.communication.discovery import open_discovery

async def main():
    plane = await open_discovery("logged:test")
    await plane.put("/a/b", b"1")
    print(dict(await plane.get("/a")))
    await plane.close()

asyncio.run(main())
"""
    assert run(environ, "-c", program) == "put /a/b\n{'/a/b': b'1'}\n"


def test_the_engine_and_the_backend_pass_their_suites(
    environ: dict[str, str], tmp_path: Path
) -> None:
    _, packages = environ["PYTHONPATH"].split(os.pathsep)
    words = ["-m", "pytest", "-q", "-o", "asyncio_mode=auto", "-p", "no:cacheprovider"]
    assert " passed" in run(environ, *words, f"{packages}/tests/test_conformance.py")


def test_the_cost_decides_in_a_replay(environ: dict[str, str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            json.dumps(
                {"timestamp": 0, "input_length": 512, "output_length": 9, "hash_ids": [number]}
            )
            + "\n"
            for number in range(4)
        )
    )
    placed = tmp_path / "placed.jsonl"
    words = [
        "-m",
        "dynamo",
        "replay",
        "--router-mode",
        "kv",
        "--router-policy",
        "fewest_requests",
        "--workers",
        "4",
    ]
    run(environ, *words, str(trace), "--decisions", str(placed))
    workers = {json.loads(line)["worker"] for line in placed.read_text().splitlines()}
    assert len(workers) == 4


def test_the_command_runs_and_is_listed(environ: dict[str, str]) -> None:
    assert run(environ, "-m", "dynamo", "hello", "you") == "Hello, you!\n"
    assert "greet the user" in run(environ, "-m", "dynamo", "--help")


def test_the_setting_has_a_flag_a_variable_and_an_explanation(environ: dict[str, str]) -> None:
    assert "--greeting" in run(environ, "-m", "dynamo", "run", "--help")
    words = ["-m", "dynamo", "config", "explain", "--json"]
    shown = run(environ | {"DYNAMO_ENGINE__GREETING": "Hi"}, *words)
    assert '"Hi"' in shown


def test_the_metric_is_exported_by_the_worker(deployment: Deployment) -> None:
    worker = next(p for p in deployment.processes() if p["role"] == "worker")
    with urllib.request.urlopen(worker["status_url"] + "/metrics", timeout=10) as response:
        assert "dynamo_worker_block_tokens 32" in response.read().decode()
