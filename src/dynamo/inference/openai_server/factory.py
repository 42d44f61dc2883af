"""Opening of engines for servers with an OpenAI API, from the settings."""

from __future__ import annotations

import re
import ssl
from functools import partial
from typing import TYPE_CHECKING

from dynamo.communication.http.client import HttpClient
from dynamo.communication.options import TlsFiles
from dynamo.communication.tls import client_tls_context
from dynamo.core.clock import Clock
from dynamo.core.errors import ConfigError
from dynamo.inference.engines.event_reader import KvEventEndpoint
from dynamo.inference.openai_server.engine import OpenAIServerEngine
from dynamo.models.card import ModelCard

if TYPE_CHECKING:
    from dynamo.core.settings import Settings
    from dynamo.core.settings.schema_engine import EngineSettings
    from dynamo.inference.engine_registry import EngineInputs


def parse_kv_events(text: str) -> KvEventEndpoint:
    """Return the endpoint of `tcp://HOST:PORT` or `tcp://HOST:PORT/REPLAY_PORT`. Raises
    `ConfigError`."""
    match = re.fullmatch(r"(tcp://[^/]+):(\d+)(?:/(\d+))?", text)
    if match is None:
        raise ConfigError(
            f"{text!r} is no address of KV events",
            hint="e.g. tcp://10.0.0.5:5557, or with the port of its replays tcp://10.0.0.5:5557/5558",
        )
    host, port, replay = match.groups()
    return KvEventEndpoint(f"{host}:{port}", f"{host}:{replay}" if replay else "")


def _open_client(settings: EngineSettings) -> HttpClient:
    """Return a client of the first of the settings' URLs. Raises `ConfigError`."""
    if not settings.urls:
        raise ConfigError("out=openai needs a URL", hint="dynamo run out=openai http://HOST:PORT")
    (url, *_) = settings.urls
    tls: ssl.SSLContext | None = None
    if url.startswith("https:"):
        tls = client_tls_context(TlsFiles(ca=settings.url_ca))
    headers = {"authorization": f"Bearer {settings.url_key}"} if settings.url_key else {}
    return HttpClient(url, headers, tls)


async def open_engine(inputs: EngineInputs) -> OpenAIServerEngine:
    """Create the engine for the first of the settings' URLs. Raises `ConfigError`."""
    from dynamo.models.tokenization.tokenizer import load_tokenizer

    settings, card = inputs.settings.engine, inputs.card
    return OpenAIServerEngine(
        await inputs.clock.offload(_open_client, settings),
        partial(load_tokenizer, card.tokenizer_file),
        inputs.clock,
        settings,
        context_tokens=card.context_tokens,
        vocab_size=card.vocab_size,
        kv_events=parse_kv_events(settings.url_kv_events[0]) if settings.url_kv_events else None,
        generation=card.generation,
    )


async def open_text_engine(
    settings: Settings, clock: Clock
) -> tuple[OpenAIServerEngine, ModelCard]:
    """Wait for the first of the settings' URLs, and return an engine without a tokenizer and the
    card of the server's model. Raises `ConfigError`."""
    engine_settings = settings.engine
    if engine_settings.url_kv_events:
        raise ConfigError(
            "KV events name tokens, and the model's tokenizer is not at hand",
            hint="name the model after the URLs, or leave the KV events out",
            param="engine.url_kv_events",
        )
    engine = OpenAIServerEngine(
        await clock.offload(_open_client, engine_settings),
        None,
        clock,
        engine_settings,
        context_tokens=settings.model.context_tokens,
    )
    facts = await engine.connect()
    card = ModelCard(
        names=tuple(settings.model.names) or (facts.model.id,),
        context_tokens=settings.model.context_tokens or facts.context_tokens,
        vocab_size=0,
        tokenizer=None,
        block_tokens=engine_settings.block_size,
        created=int(clock.wall()),
        source=engine_settings.urls[0],
    )
    return engine, card
