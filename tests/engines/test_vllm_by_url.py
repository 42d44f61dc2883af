"""`vllm serve` behind `out=openai`: the official client's tests pass through it, with the model's
tokenizer and without."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import Deployment, free_port
from tests.support.openai_client_suite import OpenAIClientSuite

READY_S = 500.0
ARGUMENTS = (
    *("--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "1024"),
    *("--max-num-seqs", "16", "--num-gpu-blocks-override", "256", "--enable-prompt-tokens-details"),
)


@pytest.fixture(scope="module")
def vllm_url(
    engine_model: Path, tmp_path_factory: pytest.TempPathFactory, runtime_environ: dict[str, str]
) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environ = runtime_environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(engine_model)]
    log = tmp_path_factory.mktemp("vllm") / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), *ARGUMENTS],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environ,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + READY_S
        while not answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"vllm serve does not answer:\n{log.read_text()[-3000:]}")
            time.sleep(1)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answers(url: str) -> bool:
    """Whether a GET is answered by 200."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.HTTPError):
        return False


@pytest.fixture(scope="module", params=["vllm by tokens", "vllm by text"])
def deployment(
    request: pytest.FixtureRequest,
    vllm_url: str,
    engine_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    runtime_environ: dict[str, str],
) -> Iterator[Deployment]:
    model = [str(engine_model)] if request.param == "vllm by tokens" else []
    words = ["out=openai", vllm_url, *model, "--model-name", "tiny"]
    deployment = Deployment(words, tmp_path_factory.mktemp("url"), runtime_environ)
    try:
        deployment.wait_ready(120)
        yield deployment
    finally:
        deployment.stop()


class TestOpenAIClient(OpenAIClientSuite):
    """Both ways to a real vLLM."""


def test_cached_tokens_are_in_the_usage(deployment: Deployment) -> None:
    question = {"role": "user", "content": "Say how the number 17 is written. " * 20}
    body = {"model": "tiny", "messages": [question], "max_tokens": 2, "temperature": 0}
    for _ in range(2):
        status, answer = deployment.post("/v1/chat/completions", body)
        assert status == 200, answer
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
