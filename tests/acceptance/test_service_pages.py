"""The code and commands of the pages about services."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, kind: str, after: str = "") -> list[str]:
    text = (ROOT / page).read_text()
    start = text.index(after)
    return [body for name, body in BLOCK.findall(text[start:]) if name == kind]


def wait_until(condition: Any, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_service_of_the_tutorial(start: Any, tmp_path: Path) -> None:
    page, section = "docs/tutorial.md", "## 7. Your own service"
    (code,) = blocks(page, "python", section)
    serve, call = blocks(page, "sh", section)
    (answer,) = blocks(page, "json", section)
    (tmp_path / "hello.py").write_text(code)
    assert serve == "dynamo serve hello:Greeter\n"

    running = start("hello:Greeter", command="serve", ready=False)
    wait_until(lambda: "Greeter serves" in running.log.read_text())
    shell = call.replace("dynamo ", f"{sys.executable} -m dynamo ", 1)
    completed = subprocess.run(
        ["sh", "-c", shell], capture_output=True, text=True, env=running.environ, check=False
    )

    assert (completed.stdout, completed.stderr) == (answer, "")
    assert running.stop() == 0


@pytest.mark.parametrize("number", range(len(blocks("docs/how-to/graphs.md", "python"))))
async def test_the_code_of_the_how_to_page(number: int) -> None:
    code = blocks("docs/how-to/graphs.md", "python")[number]
    names: dict[str, Any] = {"__name__": f"page{number}"}
    exec(compile(textwrap.dedent(code), f"graphs.md block {number}", "exec"), names)
    for name, value in list(names.items()):
        if name.startswith("test_"):
            await value()
