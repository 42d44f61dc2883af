"""The commands of docs/how-to/deploy.md. Commands with `--local` run for real, with a chat request.
Commands with Docker call a fake `docker` that records its arguments."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
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
DOCKER = [line for line in PAGE if line not in LOCAL and "--kubernetes" not in line]
PORTS = (
    *("FRONTEND_PORT", "FRONTEND_2_PORT", "ROUTER_PORT", "ETCD_PORT", "ETCD_PEER_PORT"),
    *("NATS_PORT", "NATS_MONITOR_PORT"),
)
FAKE_DOCKER = """#!/bin/sh
printf '%s\\n' "$*" >>"$CALLS"
case "$*" in *"$FAILS"*) exit 1 ;; esac
"""


class Shell:
    """A shell in the repository's root with a separate deployment."""

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
            "DYNAMO_ROUTER__DISAGGREGATION__MODE": "always",
            "CALLS": str(home / "calls"),
            "FAILS": "nothing fails",
            "START_TIMEOUT": "60",
        }

    def run(self, command: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
        """Run a command line, which may fail."""
        command = command.replace(":8000", f":{self.ports['FRONTEND_PORT']}")
        return subprocess.run(
            ["bash", "-c", command], env=self.environ, capture_output=True, text=True, cwd=folder
        )

    def ask(self) -> tuple[str, str]:
        """Send a chat request. Returns the workers that computed answer and prompt."""
        body = b'{"model": "default", "messages": [{"role": "user", "content": "Hello"}]}'
        url = f"http://127.0.0.1:{self.ports['FRONTEND_PORT']}/v1/chat/completions"
        head = {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, body, head), timeout=30) as answer:
            return answer.headers["x-dynamo-worker"], answer.headers["x-dynamo-prefill-worker"]

    def calls(self) -> list[str]:
        """Return the arguments of the calls of docker, without --file and --env-file."""
        text = Path(self.environ["CALLS"]).read_text()
        return re.sub(r"--(file|env-file) \S+ ", "", text).splitlines()


@pytest.fixture
def shell(tmp_path: Path, tiny_model: Path) -> Iterator[Shell]:
    tmp_path.chmod(0o700)
    shell = Shell(tmp_path, tiny_model)
    yield shell
    shell.run(f"{SCRIPT} --local cleanup")


@pytest.fixture
def docker(shell: Shell, tmp_path: Path) -> Iterator[Shell]:
    """Add a fake `docker`, a copy of `deploy/` and a server that answers health checks."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text(FAKE_DOCKER)
    (tmp_path / "bin" / "docker").chmod(0o755)
    (tmp_path / "there").mkdir()
    subprocess.run(
        ["cp", "-r", ROOT / "deploy", ROOT / "container", tmp_path / "there"], check=True
    )
    (tmp_path / "there" / "deploy" / "secrets.env").unlink(missing_ok=True)
    address = ("127.0.0.1", int(shell.ports["FRONTEND_PORT"]))
    with http.server.HTTPServer(address, HealthHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield shell
        server.shutdown()
        thread.join()


class HealthHandler(http.server.BaseHTTPRequestHandler):
    """Answers 200."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.timeout(180)
def test_the_stack_without_docker(shell: Shell) -> None:
    outputs = {}
    for command in LOCAL:
        completed = shell.run(command)
        assert completed.returncode == 0, (command, completed.stdout, completed.stderr)
        outputs[command] = completed.stdout
        if "--disagg" in command:
            worker, prefill_worker = shell.ask()
            assert worker.startswith("decode-worker-")
            assert prefill_worker.startswith("prefill-worker-")
    (chat,) = (text for command, text in outputs.items() if command.startswith("curl"))
    assert json.loads(chat)["usage"]["completion_tokens"] == 8
    assert outputs["deploy/deploy.sh --local status"].count(" healthy\n") == 7
    assert outputs["deploy/deploy.sh --local stop"].splitlines()[-2:] == [
        "nats has stopped",
        "etcd has stopped",
    ]
    assert not Path(shell.environ["DEPLOY_STATE"]).exists() or not list(
        Path(shell.environ["DEPLOY_STATE"]).glob("*.pid")
    )


def test_the_commands_with_docker(docker: Shell, tmp_path: Path) -> None:
    for command in DOCKER:
        completed = docker.run(command, tmp_path / "there")
        assert completed.returncode == 0, (command, completed.stderr)
    calls = [call for call in docker.calls() if call not in {"info", "compose version"}]
    wait = "compose --profile stack up --detach --wait --wait-timeout 60"
    down = "compose --profile stack --profile stack --profile disagg down"
    native = f"build --tag dynamo:latest-native --tag dynamo:latest {tmp_path / 'there'}"
    assert calls == [
        native,
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
        native,
        f"build --tag dynamo:latest-vllm {tmp_path / 'there'}",
        wait,
        f"build --tag dynamo:latest-sglang {tmp_path / 'there'}",
        down.replace("--profile stack", "--profile disagg", 1),
        wait.replace("stack", "disagg"),
    ]
    assert Path(docker.environ["CALLS"]).read_text().count("docker-compose.gpu.yml") == 1


def test_passwords_are_generated_once_and_not_printed(docker: Shell, tmp_path: Path) -> None:
    there = tmp_path / "there"
    first = docker.run("deploy/deploy.sh start", there)
    secrets = (there / "deploy" / "secrets.env").read_text()
    docker.run("deploy/deploy.sh start", there)
    assert (there / "deploy" / "secrets.env").read_text() == secrets
    assert (there / "deploy" / "secrets.env").stat().st_mode & 0o077 == 0
    values = dict(line.split("=") for line in secrets.splitlines())
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
def test_errors_of_docker_are_reported(docker: Shell, fails: str, says: str) -> None:
    docker.environ["FAILS"] = fails
    completed = docker.run("deploy/deploy.sh start", Path(docker.environ["CALLS"]).parent / "there")
    assert completed.returncode == 1
    assert says in completed.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("--help", 0, "usage: deploy.sh"),
        ("", 2, "a command is missing"),
        ("fly", 2, "unknown command fly"),
        ("--fast start", 2, "unknown option --fast"),
        ("start everything", 2, "start takes no argument everything"),
        ("--local status", 1, "not running"),
        ("--local logs router", 1, "no log of router"),
    ],
)
def test_errors_say_what_to_do(shell: Shell, words: str, code: int, says: str) -> None:
    completed = shell.run(f"{SCRIPT} {words}", Path("/"))
    assert completed.returncode == code
    assert says in completed.stdout + completed.stderr


def test_cleanup_deletes_no_kinds_of_a_cluster_that_does_not_say_what_it_has(
    shell: Shell, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir(exist_ok=True)
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.write_text(FAKE_DOCKER)
    kubectl.chmod(0o755)
    shell.environ["FAILS"] = "get crd"
    assert shell.run("deploy/deploy.sh --kubernetes cleanup").returncode != 0
    calls = (tmp_path / "calls").read_text()
    assert "get crd" in calls
    assert "delete" not in calls


def test_a_part_that_cannot_start_is_named_immediately(shell: Shell) -> None:
    shell.environ["DYNAMO_MODEL__PATH"] = "/nonesuch"
    completed = shell.run(f"{SCRIPT} --local start")
    assert completed.returncode == 1
    assert "there is no file or folder /nonesuch" in completed.stderr
    assert "worker has ended" in completed.stderr


def test_a_port_in_use_is_reported_before_anything_starts(docker: Shell) -> None:
    completed = docker.run(f"{SCRIPT} --local start")
    assert completed.returncode == 1
    assert "FRONTEND_PORT=PORT" in completed.stderr
    assert "is healthy" not in completed.stdout
