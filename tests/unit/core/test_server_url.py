"""URLs of servers with an OpenAI API."""

import pytest

from dynamo.cli.run import parse_words
from dynamo.communication.http.client import HttpClient
from dynamo.core.errors import ConfigError
from dynamo.core.settings.server_url import server_url


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_a_server_has_one_url(end: str) -> None:
    assert server_url(f"http://host:8000{end}") == "http://host:8000"
    assert server_url(f"https://host/api{end}") == "https://host/api"


@pytest.mark.parametrize(
    "url", ["ftp://host", "http://", "http://host:x", "http://host/\u72ac", f"http://{'a' * 64}"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is no URL"):
        server_url(url)


@pytest.mark.parametrize(
    "url",
    ["http://me:hush@host", "http://:hush@host", "http://me:hush@host:x", "http://host/v1?k=hush"],
)
def test_credentials_of_a_url_are_refused_and_not_shown(url: str) -> None:
    for use in (
        server_url,
        lambda url: HttpClient(url, {}, None),
        lambda url: parse_words(["out=openai", url]),
    ):
        with pytest.raises(ConfigError, match="has a user, a password or a query") as refused:
            use(url)
        assert "hush" not in f"{refused.value} {refused.value.hint}"


def test_a_header_that_http_does_not_transport_is_refused_and_not_shown() -> None:
    for key in ("hush\n", "hush\u72ac"):
        with pytest.raises(ConfigError, match="the header 'authorization'") as refused:
            HttpClient("http://host", {"authorization": key}, None)
        assert "hush" not in f"{refused.value} {refused.value.hint}"
