"""Runs server and client of pages that show two programs, each as a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
OUTPUTS = {
    "migrate.md": "Hello world!\nHello sun!\nHello moon!\n",
    "own-process.md": "0\n1\n2\n",
}


@pytest.mark.parametrize("page", OUTPUTS)
def test_server_and_client_of_the_page(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)
    for name, text in zip(("server.py", "client.py"), blocks, strict=True):
        (tmp_path / name).write_text(text)
    environ = os.environ | {
        "DYNAMO_RUNTIME__DISCOVERY": f"file:{tmp_path / 'discovery'}",
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    server = subprocess.Popen(
        [sys.executable, "server.py"], cwd=tmp_path, env=environ, stderr=subprocess.PIPE
    )
    try:
        client = subprocess.run(
            [sys.executable, "client.py"],
            cwd=tmp_path,
            env=environ,
            timeout=40,
            capture_output=True,
            text=True,
            check=True,
        )
        assert client.stdout == OUTPUTS[page]
    finally:
        server.send_signal(signal.SIGTERM)
        _, log = server.communicate(timeout=20)
    assert server.returncode == 0
    assert b"Traceback" not in log
