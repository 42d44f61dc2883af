"""llama.cpp's own server with the default model, at a port with a key."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.fake_openai_server import KEY

from dynamo.inference.llamacpp.server import ServerSizes, open_server
from dynamo.models.resolve import resolve_model_blocking


@pytest.fixture(scope="module")
def llama_url() -> Iterator[str]:
    """The URL of the server."""
    server = open_server(
        resolve_model_blocking("").path,
        ServerSizes(
            slots=4, context_tokens=256, arguments={"api_keys": [KEY], "n_threads_http": 16}
        ),
    )
    yield server.listening_address
    del server
