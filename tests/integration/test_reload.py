"""Reload of settings while a deployment serves."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.conftest import until

FILE = """
server: {{log_requests: {log}, request_timeout: {limit}}}
engine: {{kind: mock, speedup_ratio: 0.01, workers: {workers}}}
logging: {{level: {level}, format: json}}
router: {{mode: kv, policy: composite, routing_strategy: {{load_weight: {weight}}}}}
"""
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


def write(file: Path, **values: Any) -> None:
    values_with_defaults = {
        "log": "false",
        "limit": "5m",
        "workers": 1,
        "level": "info",
        "weight": 0.3,
    } | values
    file.write_text(FILE.format(**values_with_defaults))


def log_lines(running: Any, word: str) -> list[str]:
    """The lines of the deployment's log that contain `word`."""
    return [line for line in running.log.read_text().splitlines() if word in line]


def test_safe_settings_change_and_others_need_a_restart(
    start: Any, tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    write(file)
    running = start(tiny_model, "-f", file)

    write(file, log="true", limit="300ms", workers=2, level="dynamo.services=debug", weight=9)
    until(
        lambda: log_lines(running, '"setting":"logging.level"')
    )  # the frontend gets the change next
    until(lambda: running.post("/v1/chat/completions", ASK)[0] == 504)
    until(lambda: log_lines(running, '"path":"/v1/chat/completions"'))
    weight = '"setting":"router.routing_strategy.load_weight","before":0.3,"after":9.0'
    until(lambda: log_lines(running, weight))
    until(lambda: log_lines(running, '"engine.workers"'))
    (line,) = log_lines(running, '"engine.workers"')
    assert "a changed setting needs a restart" in line
    assert len([p for p in running.processes() if p["role"] == "worker"]) == 1

    file.write_text("server: {log_request: true}")
    until(lambda: "settings not reloaded" in running.log.read_text())
    assert "did you mean 'server.log_requests'?" in running.log.read_text()
    write(file, log="true", limit="300ms", level="dynamo.services=debug", weight=9)
    until(lambda: running.log.read_text().count("settings reloaded: nothing changed"))
    running.process.send_signal(signal.SIGHUP)
    until(lambda: running.log.read_text().count("settings reloaded: nothing changed") == 2)
    assert running.stop() == 0


def test_keys_of_a_changed_file_hold_after_a_restart(
    start: Any, tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text("old-key\n")
    running = start("out=mock", tiny_model, "--server.api_keys_file", file)

    def status(key: str) -> int:
        request = urllib.request.Request(
            f"{running.url}/v1/models", headers={"authorization": f"Bearer {key}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return int(error.code)

    assert (status("old-key"), status("new-key")) == (200, 401)
    file.write_text("new-key\nother-key\n")
    until(lambda: log_lines(running, "a changed setting needs a restart"))
    command = [sys.executable, "-m", "dynamo", "restart", "frontend", "--deployment"]
    subprocess.run([*command, str(running.port)], env=running.environ, check=True)
    assert (status("old-key"), status("new-key"), status("other-key")) == (401, 200, 200)
    assert "-key" not in running.log.read_text()
