"""Models behind the OpenAI API of another server: our own frontend and llama.cpp."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from tests.conftest import Deployment, free_port
from tests.support.fake_openai_server import make_engine
from tests.support.llamacpp_server import llama_url as _llama_url

from dynamo.core.errors import ConfigError
from dynamo.core.reply import Engine
from dynamo.scheduling.worker_health import FAILURE_THRESHOLD
from dynamo_conformance.engines import EngineConformance

llama_url = _llama_url

QUESTION = [{"role": "user", "content": "the quick brown fox"}]


class TestLlamaCppServer(EngineConformance):
    """llama.cpp's own server, by its HTTP port."""

    @pytest.fixture
    async def engine(self, llama_url: str) -> AsyncIterator[Engine]:
        engine = make_engine(llama_url)
        await engine.start()
        yield engine
        await engine.stop()

    async def test_clear_blocks_empties_every_rank_at_once(self, engine: Engine) -> None:
        assert await engine.clear_blocks() == 0  # a server by its URL keeps its cache

    async def test_salted_prompts_share_no_blocks_with_others(self, engine: Engine) -> None:
        pytest.skip("the slots of the server have no salt: salted prompts reuse nothing")


async def test_a_refused_key_is_an_error_with_what_to_set(llama_url: str) -> None:
    engine = make_engine(llama_url, key="")
    with pytest.raises(ConfigError, match="refuses the key") as refused:
        await engine.start()
    assert "url_key_file" in refused.value.hint


def test_our_own_frontend_behind_a_url(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, runtime_environ: dict[str, str]
) -> None:
    folder = tmp_path_factory.mktemp("chain")
    mock = ["out=mock", str(tiny_model), "--timing", "constant:0,0"]
    inner = Deployment(mock, folder, runtime_environ)
    outer = None
    try:
        inner.wait_ready()
        outer = Deployment(["out=openai", inner.url, str(tiny_model)], folder, runtime_environ)
        outer.wait_ready()
        texts = [chat(deployment.url) for deployment in (inner, outer)]
        assert texts[0] == texts[1]
        assert len(texts[1][0]) > 10
    finally:
        for deployment in filter(None, (outer, inner)):
            deployment.stop()


def test_a_callers_wrong_key_ejects_no_server(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, runtime_environ: dict[str, str]
) -> None:
    folder = tmp_path_factory.mktemp("keys")
    mock = ["out=mock", str(tiny_model), "--timing", "constant:0,0"]
    inner = Deployment(mock, folder, runtime_environ | {"DYNAMO_SERVER__API_KEYS": "good"})
    outer = None
    try:
        inner.wait_ready()
        outer = Deployment(
            ["out=openai", inner.url, str(tiny_model), "--pass-api-key"],
            folder,
            runtime_environ | {"DYNAMO_ENGINE__URL_KEY": "good"},
        )
        outer.wait_ready()
        for _ in range(FAILURE_THRESHOLD):
            with pytest.raises(openai.AuthenticationError, match="the API key is unknown"):
                chat(outer.url, "wrong")
        assert len(chat(outer.url, "good")[0]) > 10
    finally:
        for deployment in filter(None, (outer, inner)):
            deployment.stop()


def test_a_server_is_added_dies_and_is_removed(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, runtime_environ: dict[str, str]
) -> None:
    folder = tmp_path_factory.mktemp("added")
    mock = ["out=mock", str(tiny_model), "--timing", "constant:0,0"]
    inner = Deployment(mock, folder, runtime_environ)
    outer = Deployment([*mock, "--router-mode", "round_robin"], folder, runtime_environ)
    try:
        inner.wait_ready()
        outer.wait_ready()
        expected = chat(outer.url)
        assert control(outer, "add", f"{inner.url}/") == (0, f"worker-1 serves {inner.url}\n")
        assert [chat(outer.url) for _ in range(4)] == [expected] * 4
        assert control(outer, "add", inner.url)[0] == 2
        inner.process.kill()
        assert [chat(outer.url) for _ in range(4)] == [expected] * 4
        assert control(outer, "remove", inner.url) == (0, "worker-1 has left\n")
        assert control(outer, "remove", inner.url)[0] != 0
        assert chat(outer.url) == expected
    finally:
        for deployment in (outer, inner):
            deployment.stop()


def test_a_url_without_a_server_is_removed_while_it_is_added(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, runtime_environ: dict[str, str]
) -> None:
    mock = ["out=mock", str(tiny_model), "--timing", "constant:0,0"]
    deployment = Deployment(mock, tmp_path_factory.mktemp("dead"), runtime_environ)
    url = f"http://127.0.0.1:{free_port()}"
    try:
        deployment.wait_ready()
        with ThreadPoolExecutor(1) as threads:
            adding = threads.submit(control, deployment, "add", f"{url}/v1")
            while (removed := control(deployment, "remove", url))[0] != 0:
                assert not adding.done()
            assert removed == (0, "worker-1 has left\n")
            assert adding.result()[0] != 0
    finally:
        deployment.stop()


def control(deployment: Deployment, *arguments: str) -> tuple[int, str]:
    """Run a command on a deployment, and return its exit code and output."""
    port = str(deployment.port)
    command = [sys.executable, "-m", "dynamo", *arguments, "--deployment", port]
    ended = subprocess.run(command, capture_output=True, text=True, env=deployment.environ)
    return ended.returncode, ended.stdout


def chat(url: str, key: str = "any") -> tuple[str, int]:
    """Return the streamed text and the number of its tokens."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        chunks = client.chat.completions.create(
            model="default",
            messages=QUESTION,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, tokens = "", 0
        for chunk in chunks:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    return text, tokens
