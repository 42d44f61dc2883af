"""`dynamo indexer` as a separate command beside a deployment."""

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


def view_modes(deployment: Deployment) -> set[str]:
    health = json.loads(deployment.get("/health")[1])
    return {mode for views in health["routing"].values() for mode in views.values()}


def test_routers_use_the_indexer_and_continue_without_it(
    start: Callable[..., Deployment], tiny_model: Path, tmp_path: Path
) -> None:
    fast = ("--speedup-ratio", "1000", "--model-name", "tiny")
    deployment = start(
        "out=mock", tiny_model, "--workers", 2, "--router-mode", "kv", "--shared-index", *fast
    )
    saved = tmp_path / "index.bin"
    command = [sys.executable, "-m", "dynamo", "indexer", "--deployment", f"http-{deployment.port}"]
    environ = {**os.environ, **deployment.environ}
    process = subprocess.Popen([*command, "--index.file", str(saved)], env=environ)
    try:
        until(lambda: view_modes(deployment) == {"exact"})
        assert deployment.post("/v1/chat/completions", ASK)[0] == 200
        hit = until(
            lambda: deployment.post("/v1/chat/completions", ASK)[1]["usage"][
                "prompt_tokens_details"
            ]
        )
        assert hit["cached_tokens"] > 0
        process.terminate()
        assert process.wait(20) == 0
        assert saved.stat().st_size > 100
    finally:
        process.kill()
        process.wait()
    until(lambda: view_modes(deployment) == {"approximate"})
    assert deployment.post("/v1/chat/completions", ASK)[0] == 200
    doctor = subprocess.run(
        [
            sys.executable,
            "-m",
            "dynamo",
            "doctor",
            "--json",
            "--deployment",
            f"http-{deployment.port}",
        ],
        env=environ,
        capture_output=True,
    )
    routing = next(check for check in json.loads(doctor.stdout) if check["check"] == "routing")
    assert routing["verdict"] == "warn"
    assert "cache view of 2 workers: approximate" in routing["found"]


def test_stopping_a_deployment_ends_its_indexer_too(
    start: Callable[..., Deployment], tiny_model: Path
) -> None:
    fast = ("--speedup-ratio", "1000", "--model-name", "tiny")
    routers = ("--router-replicas", "1", "--router.port", "0", "--router-mode", "kv")
    deployment = start("out=mock", tiny_model, *routers, "--shared-index", *fast)
    name = f"http-{deployment.port}"
    dynamo = [sys.executable, "-m", "dynamo"]
    environ = {**os.environ, **deployment.environ}
    process = subprocess.Popen([*dynamo, "indexer", "--deployment", name], env=environ)

    def routing() -> str:
        doctor = subprocess.run(
            [*dynamo, "doctor", "--json", "--deployment", name], env=environ, capture_output=True
        )
        checks = json.loads(doctor.stdout)
        return str(next(check["found"] for check in checks if check["check"] == "routing"))

    try:
        until(lambda: "cache view of 1 workers: exact" in routing())
        subprocess.run([*dynamo, "stop", name, "--timeout", "20"], env=environ, check=True)
        assert process.wait(5) == 0
    finally:
        process.kill()
        process.wait()
