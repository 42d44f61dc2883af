"""Secrets in files, and what is shown of secrets and of URLs with credentials."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.core.redaction import redact_urls
from dynamo.core.settings import LoadedSettings, SourcedValue, resolve_settings
from dynamo.core.settings.explain import effective_settings
from dynamo.core.settings.keys import environment_name, secret_file_key, setting_specs_by_key
from dynamo.core.settings.reload import apply_reload
from dynamo.core.settings.secret_files import SecretFile

SECRETS = [key for key, spec in setting_specs_by_key().items() if spec.meta.secret]
FILES = {
    "/a": SecretFile("swordfish-swordfish\n"),
    "/keys": SecretFile("one\n\n two,three \n"),
    "/open": SecretFile("x" * 16, world_readable=True),
}


def load(
    flags: dict[str, str] | None = None, environ: dict[str, str] | None = None, text: str = ""
) -> LoadedSettings:
    sourced = {key: SourcedValue(value, f"flag --{key}") for key, value in (flags or {}).items()}
    return resolve_settings(sourced, environ, (text, "f.yaml"), read)


def read(path: str) -> SecretFile:
    if path not in FILES:
        raise FileNotFoundError(2, "No such file or directory")
    return FILES[path]


def test_the_secrets_are_known() -> None:
    assert {"server.api_keys", "security.secret", "messaging.nats.password"} <= set(SECRETS)


@pytest.mark.parametrize("key", SECRETS)
def test_every_secret_is_read_from_a_file(key: str) -> None:
    name = environment_name(secret_file_key(key))
    loaded = load(environ={name: "/a"})

    assert loaded.values[key] in {"swordfish-swordfish", ("swordfish-swordfish",)}
    assert loaded.origins[key] == "file /a"
    assert loaded.origins[secret_file_key(key)] == f"environment {name}"
    shown = {row.key: row.value for row in effective_settings(loaded)}
    assert shown[key] == "***"
    assert shown[secret_file_key(key)] == "/a"


def test_a_file_may_be_named_in_a_document_and_by_a_flag() -> None:
    text = "security: {secret_file: /a}\ndistributed_runtime: {etcd: {password_file: /a}}"
    settings = load({"server.api_keys_file": "/keys"}, text=text).settings

    assert settings.security.secret == "swordfish-swordfish"
    assert settings.discovery.etcd.password == "swordfish-swordfish"
    assert settings.server.api_keys == ("one", "two", "three")


def test_the_strongest_source_decides_whether_the_file_is_read() -> None:
    weaker = "security: {secret_file: /missing}"
    environ = {"DYNAMO_SECURITY__SECRET": "from the environment"}
    loaded = load(environ=environ, text=weaker)
    assert loaded.settings.security.secret == "from the environment"
    assert loaded.values["security.secret_file"] == ""

    assert load({"security.secret_file": "/a"}, environ).settings.security.secret[:5] == "sword"
    empty = {"DYNAMO_SECURITY__SECRET_FILE": ""}
    assert load(environ=empty, text="security: {secret: in the file}").settings.security.secret


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{secret_file: /b}", "secret_file = '/b' (f.yaml:1): No such file or directory"),
        ("{secret_file: [/a]}", "['/a']\" (f.yaml:1): No such file or directory"),
        ("{secret_file: /a, secret: b}", "secret (f.yaml:1) and security.secret_file (f.yaml:1)"),
    ],
)
def test_wrong_files_are_errors(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text=f"security: {text}")

    assert message in caught.value.message
    assert caught.value.hint


def test_programs_without_a_reader_refuse_files() -> None:
    with pytest.raises(ConfigError, match="not read here"):
        resolve_settings(environ={"DYNAMO_SECURITY__SECRET_FILE": "/a"})


def test_secrets_that_other_users_can_see_are_noted() -> None:
    notes = load({"security.secret_file": "/open", "messaging.nats.password": "seen"}).notes

    assert "chmod 600 /open" in notes["security.secret_file"]
    assert "messaging.nats.password_file" in notes["messaging.nats.password"]
    assert load({"security.secret_file": "/a"}).notes == {}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("nats://user:pass@host:4222", "nats://***@host:4222"),
        ("nats://token@host", "nats://***@host"),
        ("nats://u:p@a,tls://u:p@b", "nats://***@a,tls://***@b"),
        ("etcd://u:p@a:1,u:p@b:2/root", "etcd://***@a:1,***@b:2/root"),
        ("x://u:p/a@b@host", "x://***@host"),
        ('error="no tls://u:p@h" me@home', 'error="no tls://***@h" me@home'),
        ("http://host/path mail me@home", "http://host/path mail me@home"),
        ("a@b,c", "a@b,c"),
        ("", ""),
    ],
)
def test_credentials_in_urls_are_redacted(text: str, shown: str) -> None:
    assert redact_urls(text) == shown


def test_redaction_of_long_text_is_linear() -> None:
    assert redact_urls("@" + "://" * 300_000 + "a," * 300_000) != ""


def test_explained_and_reloaded_settings_show_no_credentials() -> None:
    servers: Any = "messaging: {nats: {servers: ['nats://u:p@a', 'nats://u:p@b']}}"
    loaded = load({"runtime.discovery": "etcd://u:p@a/root"}, text=servers)
    shown = {row.key: row.value for row in effective_settings(loaded)}
    _, changes = apply_reload(resolve_settings().settings, loaded.settings)

    assert shown["runtime.discovery"] == "etcd://***@a/root"
    assert list(shown["messaging.nats.servers"]) == ["nats://***@a", "nats://***@b"]
    assert "u:p" not in repr(changes)
    with pytest.raises(ConfigError) as caught:
        load(text="messaging: {type: 'nats://u:p@a'}")
    assert "u:p" not in caught.value.message
