"""The log lines of a request in all processes of a deployment."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "swordfish"}], "max_tokens": 3}


def ask(url: str, request_id: str) -> None:
    headers = {"content-type": "application/json", "x-request-id": request_id}
    path = f"{url}/v1/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(path, json.dumps(BODY).encode(), headers)):
        pass


def test_every_process_logs_the_request_id_and_none_the_text(
    start: Any, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUST_LOG", "warn,dynamo::application=info,dynamo.communication=debug")
    json_logs = ("--log-format", "json", "--log-requests")
    running = start("out=mock", tiny_model, "--model-name", "tiny", *json_logs)

    ask(running.url, "order-7")
    assert running.stop() == 0

    text = running.log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert all({"time", "level", "component", "target", "message"} <= line.keys() for line in lines)
    request_lines = [line for line in lines if line.get("request_id", "").startswith("order-7")]
    assert {(line["component"], line["message"]) for line in request_lines} >= {
        ("frontend", "request"),
        ("worker", "call"),
    }
    assert len({line["request_id"].partition(".")[0] for line in request_lines}) == 1
    chosen = ("dynamo.application", "dynamo.communication")
    assert [line for line in lines if not line["target"].startswith(chosen)] == []
    assert "swordfish" not in text


def test_log_prompts_logs_the_text(start: Any, tiny_model: Path) -> None:
    running = start("out=echo", tiny_model, "--model-name", "tiny", "--log-prompts")

    ask(running.url, "order-8")
    assert running.stop() == 0

    (line,) = [line for line in running.log.read_text().splitlines() if "swordfish" in line]
    assert "request_id=order-8-" in line
