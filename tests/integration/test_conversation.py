"""`dynamo run in=text`: a pipe or a terminal as input, the answer as output."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

DYNAMO = [sys.executable, "-m", "dynamo"]
FAST = ["--speedup-ratio", "1000", "--sampling.max_tokens", "8"]


@pytest.fixture
def environ(runtime_environ: dict[str, str]) -> dict[str, str]:
    return os.environ | runtime_environ


def test_a_pipe_is_one_message(tiny_model: Path, environ: dict[str, str]) -> None:
    command = [*DYNAMO, "run", "in=text", "out=mock", str(tiny_model), *FAST]
    ended = subprocess.run(
        command,
        input="a lazy dog\nand more",
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip()
    assert "Traceback" not in ended.stderr
    ps = subprocess.run([*DYNAMO, "ps", "--json"], capture_output=True, env=environ, check=True)
    assert [p for p in json.loads(ps.stdout) if p["deployment"].startswith("text-")] == []


def test_a_terminal_is_a_conversation(tiny_model: Path, environ: dict[str, str]) -> None:
    parent_end, child_end = pty.openpty()
    command = [*DYNAMO, "run", "in=text", "out=mock", str(tiny_model), *FAST]
    child = subprocess.Popen(
        command, stdin=child_end, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
    )
    os.close(child_end)
    os.write(parent_end, b"the quick\nbrown fox\n\x04")
    out, err = child.communicate(timeout=50)
    os.close(parent_end)

    assert child.returncode == 0, err.decode()
    assert out.decode().count("> ") >= 3
    assert b"each line is a message" in err


def test_a_message_beyond_the_context_is_an_error(
    tiny_model: Path, environ: dict[str, str]
) -> None:
    command = [*DYNAMO, "run", "in=text", "out=mock", str(tiny_model), "--max-model-len", "32"]
    ended = subprocess.run(
        command, input="word " * 200, capture_output=True, text=True, env=environ, check=False
    )

    assert ended.returncode == 1
    assert "error: " in ended.stderr
    assert "Traceback" not in ended.stderr


def test_ctrl_c_ends_an_answer(tiny_model: Path, environ: dict[str, str]) -> None:
    slow = ["--timing", "constant:1,500", "--sampling.max_tokens", "1000"]
    command = [*DYNAMO, "run", "in=text", "out=mock", str(tiny_model), *slow]
    parent_end, child_end = pty.openpty()
    child = subprocess.Popen(
        command, stdin=child_end, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
    )
    os.close(child_end)
    assert child.stdout is not None
    while child.stdout.read(1) != b">":
        pass
    os.write(parent_end, b"the quick\n")
    child.stdout.read(len(" w"))  # the prompt's space and the first character of the answer
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=20)  # well before the drain time
    os.close(parent_end)

    assert child.returncode == 0, err.decode()
    assert b"error" not in err
    assert b"cancelled after the drain" not in err
