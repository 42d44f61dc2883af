"""The commands of docs/how-to/deploy.md as they stand: without Docker for real, one chat request
included; those with Docker before a stand-in that notes how it was called."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import free_port

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "deploy.sh"
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGE = [
    line
    for block in BLOCK.findall((ROOT / "docs" / "how-to" / "deploy.md").read_text())
    for line in block.splitlines()
]
LOCAL = [line for line in PAGE if "--local" in line or line.startswith("curl")]
DOCKER = [line for line in PAGE if line not in LOCAL]
PORTS = (
    *("FRONTEND_PORT", "FRONTEND_2_PORT", "ROUTER_PORT", "ETCD_PORT", "ETCD_PEER_PORT"),
    *("NATS_PORT", "NATS_MONITOR_PORT"),
)
STAND_IN = """#!/bin/sh
printf '%s\\n' "$*" >>"$CALLS"
case "$*" in *"$FAILS"*) exit 1 ;; esac
"""


class Shell:
    """A user's, in the repository's root, with a deployment of its own."""

    def __init__(self, home: Path, model: Path) -> None:
        self.ports = {name: str(free_port()) for name in PORTS}
        self.environ = os.environ | self.ports
        self.environ |= {
            "PATH": f"{home / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "XDG_RUNTIME_DIR": str(home),
            "DEPLOY_STATE": str(home / "deployed"),
            "DYNAMO_ENGINE__KIND": "mock",
            "DYNAMO_ENGINE__SPEEDUP_RATIO": "1000",
            "DYNAMO_MODEL__PATH": str(model),
            "CALLS": str(home / "calls"),
            "FAILS": "nothing fails",
            "START_TIMEOUT": "60",
        }

    def run(self, command: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
        """One command line; it may fail."""
        command = command.replace(":8000", f":{self.ports['FRONTEND_PORT']}")
        return subprocess.run(
            ["bash", "-c", command], env=self.environ, capture_output=True, text=True, cwd=folder
        )

    def calls(self) -> list[str]:
        """How Docker was called, without the files that are named each time."""
        text = Path(self.environ["CALLS"]).read_text()
        return re.sub(r"--(file|env-file) \S+ ", "", text).splitlines()


@pytest.fixture
def shell(tmp_path: Path, tiny_model: Path) -> Iterator[Shell]:
    tmp_path.chmod(0o700)
    made = Shell(tmp_path, tiny_model)
    yield made
    made.run(f"{SCRIPT} --local cleanup")


@pytest.fixture
def docker(shell: Shell, tmp_path: Path) -> Iterator[Shell]:
    """With something called docker, a copy of `deploy/`, and somebody who is well."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text(STAND_IN)
    (tmp_path / "bin" / "docker").chmod(0o755)
    (tmp_path / "there").mkdir()
    subprocess.run(["cp", "-r", ROOT / "deploy", tmp_path / "there"], check=True)
    (tmp_path / "there" / "deploy" / "secrets.env").unlink(missing_ok=True)
    address = ("127.0.0.1", int(shell.ports["FRONTEND_PORT"]))
    with http.server.HTTPServer(address, Well) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield shell
        server.shutdown()
        thread.join()


class Well(http.server.BaseHTTPRequestHandler):
    """Answers 200."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.timeout(180)
def test_the_stack_without_docker(shell: Shell) -> None:
    said = {}
    for command in LOCAL:
        ended = shell.run(command)
        assert ended.returncode == 0, (command, ended.stdout, ended.stderr)
        said[command] = ended.stdout
    (chat,) = (text for command, text in said.items() if command.startswith("curl"))
    assert json.loads(chat)["usage"]["completion_tokens"] == 8
    assert said["deploy/deploy.sh --local status"].count(" well\n") == 6
    assert said["deploy/deploy.sh --local stop"].splitlines()[-2:] == [
        "nats has stopped",
        "etcd has stopped",
    ]
    assert not Path(shell.environ["DEPLOY_STATE"]).exists() or not list(
        Path(shell.environ["DEPLOY_STATE"]).glob("*.pid")
    )


def test_the_commands_with_docker(docker: Shell, tmp_path: Path) -> None:
    for command in DOCKER:
        ended = docker.run(command, tmp_path / "there")
        assert ended.returncode == 0, (command, ended.stderr)
    done = [call for call in docker.calls() if call not in {"info", "compose version"}]
    wait = "compose --profile stack up --detach --wait --wait-timeout 60"
    down = "compose --profile stack --profile stack down"
    assert done == [
        "compose --profile stack build",
        wait,
        "compose --profile stack ps --all",
        "compose --profile stack logs --follow dynamo-router",
        down,
        wait,
        down,
        f"{down} --volumes --remove-orphans",
        wait,
        "compose -f deploy/docker-compose.yml up -d --build",
        "compose -f deploy/docker-compose.yml --profile infra up -d",
    ]


def test_passwords_are_made_once_and_shown_to_nobody(docker: Shell, tmp_path: Path) -> None:
    there = tmp_path / "there"
    first = docker.run("deploy/deploy.sh start", there)
    made = (there / "deploy" / "secrets.env").read_text()
    docker.run("deploy/deploy.sh start", there)
    assert (there / "deploy" / "secrets.env").read_text() == made
    assert (there / "deploy" / "secrets.env").stat().st_mode & 0o077 == 0
    values = dict(line.split("=") for line in made.splitlines())
    assert len(values["GRAFANA_PASSWORD"]) == 48
    assert values["GRAFANA_PASSWORD"] not in first.stdout
    docker.run("deploy/deploy.sh cleanup", there)
    assert not (there / "deploy" / "secrets.env").exists()


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        ("compose version", "compose plugin is missing"),
        ("info", "daemon does not answer"),
        ("up --detach", "logs SERVICE"),
    ],
)
def test_what_is_wrong_with_docker_is_said(docker: Shell, fails: str, says: str) -> None:
    docker.environ["FAILS"] = fails
    ended = docker.run("deploy/deploy.sh start", Path(docker.environ["CALLS"]).parent / "there")
    assert ended.returncode == 1
    assert says in ended.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("--help", 0, "usage: deploy.sh"),
        ("", 2, "what to do?"),
        ("fly", 2, "no command is called fly"),
        ("--fast start", 2, "no option is called --fast"),
        ("start everything", 2, "start takes no everything"),
        ("--local status", 1, "does not run"),
        ("--local logs router", 1, "no log of router"),
    ],
)
def test_errors_say_what_to_do(shell: Shell, words: str, code: int, says: str) -> None:
    ended = shell.run(f"{SCRIPT} {words}", Path("/"))
    assert ended.returncode == code
    assert says in ended.stdout + ended.stderr


def test_a_part_that_cannot_start_is_named_at_once(shell: Shell) -> None:
    shell.environ["DYNAMO_MODEL__PATH"] = "/nonesuch"
    ended = shell.run(f"{SCRIPT} --local start")
    assert ended.returncode == 1
    assert "there is no file or folder /nonesuch" in ended.stderr
    assert "worker has ended" in ended.stderr


def test_a_port_in_use_is_told_before_anything_starts(docker: Shell) -> None:
    ended = docker.run(f"{SCRIPT} --local start")
    assert ended.returncode == 1
    assert "FRONTEND_PORT=PORT" in ended.stderr
    assert "is well" not in ended.stdout
