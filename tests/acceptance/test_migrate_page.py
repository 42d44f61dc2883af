"""Runs the programs of docs/how-to/migrate.md as processes, and more of NVIDIA Dynamo's API."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "migrate.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    for name, text in zip(("server.py", "client.py"), BLOCKS, strict=True):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_server_and_client_of_the_page(programs: Path) -> None:
    environ = os.environ | {
        "DYNAMO_RUNTIME__DISCOVERY": f"file:{programs / 'discovery'}",
        "XDG_RUNTIME_DIR": str(programs),
    }
    server = subprocess.Popen(
        [sys.executable, "server.py"], cwd=programs, env=environ, stderr=subprocess.PIPE
    )
    try:
        client = subprocess.run(
            [sys.executable, "client.py"],
            cwd=programs,
            env=environ,
            timeout=40,
            capture_output=True,
            text=True,
            check=True,
        )
        assert client.stdout == "Hello world!\nHello sun!\nHello moon!\n"
    finally:
        server.send_signal(signal.SIGTERM)
        _, log = server.communicate(timeout=20)
    assert server.returncode == 0
    assert b"Traceback" not in log
