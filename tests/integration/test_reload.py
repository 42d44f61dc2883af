"""A deployment's file, changed while it serves."""

from __future__ import annotations

import signal
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
    given = {"log": "false", "limit": "5m", "workers": 1, "level": "info", "weight": 0.3} | values
    file.write_text(FILE.format(**given))


def told(running: Any, word: str) -> list[str]:
    """The lines of its log with this."""
    return [line for line in running.log.read_text().splitlines() if word in line]


def test_what_is_safe_changes_and_the_rest_is_told(
    start: Any, tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    write(file)
    running = start(tiny_model, "-f", file)

    write(file, log="true", limit="300ms", workers=2, level="dynamo.services=debug", weight=9)
    until(lambda: told(running, '"setting":"logging.level"'))  # and the frontend is told next
    until(lambda: running.post("/v1/chat/completions", ASK)[0] == 504)
    until(lambda: told(running, '"path":"/v1/chat/completions"'))
    weight = '"setting":"router.routing_strategy.load_weight","before":0.3,"after":9.0'
    until(lambda: told(running, weight))
    until(lambda: told(running, '"engine.workers"'))
    (line,) = told(running, '"engine.workers"')
    assert "a changed setting needs a restart" in line
    assert len([one for one in running.processes() if one["role"] == "worker"]) == 1

    file.write_text("server: {log_request: true}")
    until(lambda: "settings not reloaded" in running.log.read_text())
    assert "did you mean 'server.log_requests'?" in running.log.read_text()
    write(file, log="true", limit="300ms", level="dynamo.services=debug", weight=9)
    until(lambda: running.log.read_text().count("settings reloaded: nothing changed"))
    running.process.send_signal(signal.SIGHUP)
    until(lambda: running.log.read_text().count("settings reloaded: nothing changed") == 2)
    assert running.stop() == 0
