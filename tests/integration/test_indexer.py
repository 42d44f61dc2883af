"""`dynamo indexer` beside a deployment, as its user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.conftest import Deployment, until

WORDS = "the quick brown fox jumps over a lazy dog " * 20
ASK = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": WORDS}]}


def modes(one: Deployment) -> set[str]:
    told = json.loads(one.get("/health")[1])
    return {mode for views in told["routing"].values() for mode in views.values()}


def test_routers_ask_it_and_go_on_without_it(
    start: Callable[..., Deployment], tiny_model: Path, tmp_path: Path
) -> None:
    fast = ("--speedup-ratio", "1000", "--model-name", "tiny")
    one = start(
        "out=mock", tiny_model, "--workers", 2, "--router-mode", "kv", "--shared-index", *fast
    )
    saved = tmp_path / "index.bin"
    command = [sys.executable, "-m", "dynamo", "indexer", "--deployment", f"http-{one.port}"]
    environ = {**os.environ, **one.environ}
    process = subprocess.Popen([*command, "--index.file", str(saved)], env=environ)
    try:
        until(lambda: modes(one) == {"exact"})
        assert one.post("/v1/chat/completions", ASK)[0] == 200
        hit = until(
            lambda: one.post("/v1/chat/completions", ASK)[1]["usage"]["prompt_tokens_details"]
        )
        assert hit["cached_tokens"] > 0
        process.terminate()
        assert process.wait(20) == 0
        assert saved.stat().st_size > 100
    finally:
        process.kill()
        process.wait()
    until(lambda: modes(one) == {"approximate"})
    assert one.post("/v1/chat/completions", ASK)[0] == 200
    told = subprocess.run(
        [sys.executable, "-m", "dynamo", "doctor", "--json", "--deployment", f"http-{one.port}"],
        env=environ,
        capture_output=True,
    )
    routing = next(found for found in json.loads(told.stdout) if found["check"] == "routing")
    assert routing["verdict"] == "warn"
    assert "2 workers approximate" in routing["found"]


def test_stopping_a_deployment_ends_its_indexer_too(
    start: Callable[..., Deployment], tiny_model: Path
) -> None:
    fast = ("--speedup-ratio", "1000", "--model-name", "tiny")
    routers = ("--router-replicas", "1", "--router.port", "0", "--router-mode", "kv")
    one = start("out=mock", tiny_model, *routers, "--shared-index", *fast)
    name = f"http-{one.port}"
    dynamo = [sys.executable, "-m", "dynamo"]
    environ = {**os.environ, **one.environ}
    process = subprocess.Popen([*dynamo, "indexer", "--deployment", name], env=environ)

    def routing() -> str:
        told = subprocess.run(
            [*dynamo, "doctor", "--json", "--deployment", name], env=environ, capture_output=True
        )
        checks = json.loads(told.stdout)
        return str(next(each["found"] for each in checks if each["check"] == "routing"))

    try:
        until(lambda: "1 workers exact" in routing())
        subprocess.run([*dynamo, "stop", name, "--timeout", "20"], env=environ, check=True)
        assert process.wait(5) == 0
    finally:
        process.kill()
        process.wait()
