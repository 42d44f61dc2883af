"""The pages about services, run as they stand."""

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


def until(true: Any, timeout_s: float = 30) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_tutorials_own_service(start: Any, tmp_path: Path) -> None:
    page, section = "docs/tutorial.md", "## 7. Your own service"
    (code,) = blocks(page, "python", section)
    serve, call = blocks(page, "sh", section)
    (answer,) = blocks(page, "json", section)
    (tmp_path / "hello.py").write_text(code)
    assert serve == "dynamo serve hello:Greeter\n"

    running = start("hello:Greeter", command="serve", ready=False)
    until(lambda: "Greeter serves" in running.log.read_text())
    shell = call.replace("dynamo ", f"{sys.executable} -m dynamo ", 1)
    ended = subprocess.run(
        ["sh", "-c", shell], capture_output=True, text=True, env=running.environ, check=False
    )

    assert (ended.stdout, ended.stderr) == (answer, "")
    assert running.stop() == 0


@pytest.mark.parametrize("number", range(len(blocks("docs/how-to/graphs.md", "python"))))
async def test_the_how_tos_code(number: int) -> None:
    code = blocks("docs/how-to/graphs.md", "python")[number]
    names: dict[str, Any] = {"__name__": f"page{number}"}
    exec(compile(textwrap.dedent(code), f"graphs.md block {number}", "exec"), names)
    for name, value in list(names.items()):
        if name.startswith("test_"):
            await value()
