"""Credentials that nobody shows."""

from __future__ import annotations

import logging
import os

import pytest
from msgspec.structs import replace

from dynamo.core import redaction
from dynamo.core.errors import WorkerFailed, decode_error, encode_error
from dynamo.core.redaction import (
    REDACTED,
    redact,
    redact_credentials,
    remember_credentials,
    remember_environment,
    remember_secrets,
)
from dynamo.core.settings import SourcedValue, resolve_settings
from dynamo.core.settings.secret_files import remember_settings
from dynamo.runtime.health import ProcessHealth
from dynamo.telemetry.logs import JsonFormatter, TextFormatter


@pytest.fixture(autouse=True)
def _no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_secrets", [])


@pytest.mark.parametrize("name", ["hf_token", "api_key", "s3.secret", "PASSWORD", "api-keys"])
def test_a_value_under_the_name_of_a_secret_is_hidden(name: str) -> None:
    assert redact_credentials({name: "word"}) == {name: REDACTED}
    assert redact_credentials({"outer": {name: ["word"]}}) == {"outer": {name: REDACTED}}


@pytest.mark.parametrize("name", ["max_tokens", "tokenizer", "monkey", "keyframes"])
def test_other_values_are_shown(name: str) -> None:
    assert redact_credentials({name: "word"}) == {name: "word"}


def test_an_empty_secret_is_shown_as_empty() -> None:
    assert redact_credentials({"hf_token": None}) == {"hf_token": None}


def test_a_secret_is_found_in_every_form() -> None:
    remember_secrets(['swordfish/"ü', "swordfish", "short"])
    text = 'key=swordfish/"ü json=swordfish/\\"ü url=swordfish%2F%22%C3%BC swordfish- short'
    assert redact(text) == "key=*** json=*** url=*** ***- short"
    assert redact('slash=swordfish\\/\\"ü lower=swordfish%2f%22%c3%bc') == "slash=*** lower=***"
    assert redact('ascii=swordfish/\\"\\u00fc path=swordfish/%22%C3%BC') == "ascii=*** path=***"
    assert redact("theirs and swordfish", "theirs", "") == "*** and ***"


def test_a_secret_of_any_bytes_is_remembered() -> None:
    secret = os.fsdecode(b"sword\xfffish")
    remember_environment({"API_KEY": secret})
    assert redact(f"key={secret} url=sword%FFfish") == "key=*** url=***"


@pytest.mark.parametrize(
    ("value", "secrets"),
    [
        ("nats://user:swordfish@host:4222", ["swordfish"]),
        ("nats://swordfish@host", ["swordfish"]),
        ("etcd://u:swordfish@a:1,u:marlinspike@b:2/root", ["swordfish", "marlinspike"]),
        (["http://u:p%40sswordfish@h"], ["p@sswordfish", "p%40sswordfish"]),
        ({"hf_token": "swordfish", "deep": {"api_key": "marlinspike"}}, ["swordfish"]),
    ],
)
def test_credentials_of_values_are_remembered(value: object, secrets: list[str]) -> None:
    remember_credentials(value)
    for secret in secrets:
        assert redact(f"not {secret}!") == "not ***!"
    assert redact("nats://user host etcd") == "nats://user host etcd"


def test_secrets_of_the_environment_are_remembered_but_not_paths_of_settings() -> None:
    remember_environment(
        {
            "AWS_SECRET_ACCESS_KEY": "swordfish",
            "HTTPS_PROXY": "http://user:marlinspike@proxy:1",
            "DYNAMO_SECURITY__TLS_KEY": "/etc/tls/key.pem",
            "HOME": "/home/user",
        }
    )
    text = "swordfish marlinspike /etc/tls/key.pem /home/user"
    assert redact(text) == "*** *** /etc/tls/key.pem /home/user"


def test_secrets_of_settings_are_remembered() -> None:
    values = {"server.api_keys": "one-api-key,two-api-key", "engine.url_key": "the-url-key"}
    flags = {key: SourcedValue(value, "flag") for key, value in values.items()}
    loaded = resolve_settings(flags, {"DYNAMO_RUNTIME__DISCOVERY": "etcd://u:marlinspike@a"})
    assert redact("one-api-key two-api-key the-url-key marlinspike") == "*** *** *** ***"
    settings = loaded.settings
    remember_settings(replace(settings, engine=replace(settings.engine, url_key="a-later-key")))
    assert redact("a-later-key") == "***"


def test_errors_health_and_logs_show_no_secret() -> None:
    remember_secrets(["swordfish"])
    error = WorkerFailed("said swordfish", hint="not swordfish")
    for shown in (error, decode_error(encode_error(error))):
        assert (shown.message, shown.hint, str(shown)) == ("said ***", "not ***", "said ***")
    health = ProcessHealth()
    health.set_unhealthy("engine", "said swordfish")
    health.add_check("plane", lambda: "swordfish")
    health.add_limitation("tiers", lambda: "no swordfish")
    assert health.reasons == {"engine": "said ***", "plane": "***"}
    assert health.limitations == {"tiers": "no ***"}
    record = logging.LogRecord("a", logging.INFO, "", 0, "said %s", ("swordfish",), None)
    record.fields = {"key": "swordfish"}
    for formatter in (TextFormatter("worker"), JsonFormatter("worker")):
        line = formatter.format(record)
        assert "swordfish" not in line
        assert line.count("***") == 2
