"""scripts/check_requirements.sh on this host."""

from __future__ import annotations

import os
import subprocess
from contextlib import closing
from pathlib import Path
from socket import create_server

import pytest
from tests.conftest import free_port

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_requirements.sh"


def check(environ: dict[str, str], *words: str) -> tuple[int, dict[str, str], str]:
    """Return the exit code, the verdict of every check, and the output."""
    ended = subprocess.run(
        [str(SCRIPT), *words], capture_output=True, text=True, env=os.environ | environ
    )
    rows = [line for line in ended.stdout.splitlines() if not line.startswith(" ")]
    verdicts = {row[6:19].strip(): row[:5].strip() for row in rows}
    return ended.returncode, verdicts, ended.stdout


def test_this_host_meets_the_requirements() -> None:
    code, verdicts, output = check({"PORTS": str(free_port())})

    assert code == 0, output
    assert {"system", "python", "cores", "memory", "disk", "open files", "docker"} <= set(verdicts)
    assert "fail" not in verdicts.values()


def test_a_server_that_cannot_be_reached_is_a_failure() -> None:
    with closing(create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        environ = {
            "PORTS": str(port),
            "DYNAMO_ETCD_ENDPOINTS": f"http://127.0.0.1:{port}",
            "DYNAMO_NATS_URL": f"nats://user:secret@127.0.0.1:{free_port()}",
        }
        code, verdicts, output = check(environ)

    assert code == 1
    assert (verdicts["etcd"], verdicts["nats"]) == ("ok", "fail")
    assert verdicts[f"port {port}"] == "warn"
    assert "secret" not in output


def test_an_old_python_is_a_failure(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\ncase "$2" in *print*) echo 3.9.2 ;; *) exit 1 ;; esac\n')
    old.chmod(0o755)

    code, verdicts, output = check({"PYTHON": str(old)})

    assert (code, verdicts["python"]) == (1, "fail")
    assert "PYTHON=PATH" in output


@pytest.mark.parametrize("word", ["--cuda", "gpu"])
def test_an_unknown_word_is_a_usage_error(word: str) -> None:
    assert check({}, word)[0] == 2
