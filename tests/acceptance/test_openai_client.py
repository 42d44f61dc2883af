"""The official `openai` client against whole deployments: workers, and servers by their URL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import Deployment
from tests.support.fake_openai_server import KEY
from tests.support.llamacpp_server import llama_url as _llama_url
from tests.support.openai_client_suite import OpenAIClientSuite

llama_url = _llama_url

pytestmark = pytest.mark.timeout(300)  # the first test of a server starts it
SERVERS = ("workers", "frontend by tokens", "frontend by text", "llama by tokens", "llama by text")


@pytest.fixture(scope="module", params=SERVERS)
def deployment(
    request: pytest.FixtureRequest,
    mock_deployment: Deployment,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    runtime_environ: dict[str, str],
) -> Iterator[Deployment]:
    if request.param == "workers":
        yield mock_deployment
        return
    kind, _, prompts = request.param.partition(" by ")
    url = mock_deployment.url if kind == "frontend" else request.getfixturevalue("llama_url")
    model = str(tiny_model) if kind == "frontend" else "SmolLM2-135M-Instruct"
    words = ["out=openai", url, *([model] if prompts == "tokens" else [])]
    environ = runtime_environ | {"DYNAMO_ENGINE__URL_KEY": KEY}
    folder = tmp_path_factory.mktemp("url")
    deployment = Deployment([*words, "--model-name", "tiny"], folder, environ)
    try:
        deployment.wait_ready()
        yield deployment
    finally:
        deployment.stop()


class TestOpenAIClient(OpenAIClientSuite):
    """All of `SERVERS`."""
