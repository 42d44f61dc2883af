"""URLs of servers with an OpenAI API."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dynamo.core.errors import ConfigError
from dynamo.core.settings.schema_engine import AUTO

if TYPE_CHECKING:
    from dynamo.core.settings.schema import Settings

EXAMPLE = "e.g. http://10.0.0.5:8000"


def server_url(url: str) -> str:
    """Return the URL by which processes name a server: without a final `/v1` or `/`. Raises
    `ConfigError`, which shows no credentials."""
    if "@" in url or "?" in url or "#" in url:
        raise ConfigError(
            "the URL of a server has a user, a password or a query",
            hint=f"{EXAMPLE}; set the key by engine.url_key_file",
            param="engine.urls",
        )
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        parts.port  # noqa: B018 - raises for what is no port
        url.encode("latin-1")
    except ValueError as error:
        raise ConfigError(f"{url!r} is no URL: {error}", param="engine.urls") from None
    if parts.scheme not in {"http", "https"} or not host:
        raise ConfigError(f"{url!r} is no URL of a server", hint=EXAMPLE, param="engine.urls")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def lacks_tokenizer(settings: Settings) -> bool:
    """Whether the workers only know servers by their URL, and no model's files."""
    engine = settings.engine
    by_url = engine.kind == "openai" or (engine.kind == AUTO and bool(engine.urls))
    return by_url and not settings.model.path
