"""Values, precedence and errors of single settings."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings, SettingSpec, SourcedValue, resolve_settings
from dynamo.core.settings.keys import environment_name, setting_specs_by_key
from dynamo.core.settings.secret_files import SecretFile


def document(text: str) -> tuple[str, str]:
    return text, "agg.yaml"


def test_defaults_apply_without_sources() -> None:
    loaded = resolve_settings()

    assert loaded.settings == Settings()
    assert set(loaded.origins.values()) == {"default"}


def test_flag_beats_environment_beats_file_beats_default() -> None:
    loaded = resolve_settings(
        {"server.http_port": SourcedValue("1", "flag --http-port")},
        {"DYNAMO_SERVER__HTTP_PORT": "2", "DYNAMO_SERVER__HTTP_HOST": "::1", "PATH": "/bin"},
        document(
            "server:\n  http_port: 3\n  http_host: 0.0.0.0\n  log_requests: yes\nrouter:\n"
            "  type: basic\n"
        ),
    )

    assert loaded.settings.server.http_port == 1
    assert loaded.settings.server.http_host == "::1"
    assert loaded.settings.server.log_requests is True
    assert loaded.settings.router.mode == "round_robin"
    assert loaded.origins["server.http_port"] == "flag --http-port"
    assert loaded.origins["server.http_host"] == "environment DYNAMO_SERVER__HTTP_HOST"
    assert loaded.origins["router.mode"] == "agg.yaml:6"
    assert loaded.origins["server.idle_timeout"] == "default"


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("server: {request_timeout: 2m}", "server.request_timeout", 120.0),
        ("server: {request_timeout: 1m30s}", "server.request_timeout", 90.0),
        ("server: {max_body_bytes: 16Mi}", "server.max_body_bytes", 16 << 20),
        ("server: {max_body_bytes: 8GB}", "server.max_body_bytes", 8 * 10**9),
        ("server: {stall_s: 1500ms}", "server.stall_s", 1.5),
        ("server: {http-port: 12}", "server.http_port", 12),
        ("server: {port: '12'}", "server.http_port", 12),
        ("router: {mode: Power-Of-Two}", "router.mode", "power_of_two"),
        ("router: {mode: weighted}", "router.mode", "weighted_round_robin"),
        ("model: {names: [a, b]}", "model.names", ("a", "b")),
        ("model: {names: 'a, b'}", "model.names", ("a", "b")),
        ('model: {names: \'["a", "b"]\'}', "model.names", ("a", "b")),
        ("sampling: {temperature: 0}", "sampling.temperature", 0.0),
        ("sampling: {temperature: null}", "sampling.temperature", None),
        ("sampling:", "sampling.temperature", None),
        ('{"engine": {"speedup_ratio": 1e6}}', "engine.speedup_ratio", 1e6),
    ],
)
def test_spellings_units_and_types_are_converted(text: str, key: str, value: Any) -> None:
    loaded = resolve_settings(document=document(text))
    setting = attrgetter(key)(loaded.settings)

    assert setting == loaded.values[key] == value
    assert type(setting) is type(value)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("server: {http_prot: 1}", "unknown setting 'server.http_prot'", "'server.http_port'"),
        ("sever: {http_port: 1}", "unknown setting 'sever'", "did you mean 'server'?"),
        ("qqq: 1", "unknown setting 'qqq'", "sections: server, responses, frontend, router"),
        ("router: {mode: kvx}", "router.mode = 'kvx'", ""),
        ("server:\n  http_port: 70000", "(agg.yaml:2): at most 65535", ""),
        ("server: {http_port: 0.5}", "whole number", ""),
        ("server: {http_port: [1]}", "wanted a number", ""),
        ("server: {http_port:}", "a value is missing", ""),
        ("server: {http_port: true}", "wanted a number", ""),
        ("server: {http_host: [1]}", "wanted a text", ""),
        ("server: {log_requests: maybe}", "true or false", ""),
        ("server: {request_timeout: 3 parsecs}", "wanted a duration", ""),
        ("server: {max_body_bytes: big}", "wanted a size", ""),
        ("server: {api_keys: {a: b}}", "= ***", ""),
        ("server: {port: 1, http_port: 2}", "given twice", ""),
        ("server: 3", "must be a mapping", "key: value"),
        ("- a", "this must be a mapping", ""),
        ("a: [", "not valid YAML", ""),
        ("\x00", "not valid YAML", ""),
        ("version: 2", "at most 1", ""),
    ],
)
def test_wrong_values_and_keys_are_named(text: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_settings(document=document(text))

    assert message in caught.value.message
    assert hint in caught.value.hint


def test_every_setting_has_an_environment_name() -> None:
    for key, spec in setting_specs_by_key().items():
        if "." not in key:
            continue
        name = environment_name(key)
        loaded = resolve_settings(
            environ={name: _example(spec)}, read_secret_file=lambda path: SecretFile("x" * 16)
        )
        assert loaded.origins[key] == f"environment {name}"


def _example(spec: SettingSpec) -> str:
    default = spec.default
    if spec.key.endswith("_file"):
        return "secret.txt"
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    if default is None:
        return spec.meta.choices[0] if spec.meta.choices else "1"
    return str(default)


def test_the_hint_names_the_nearest_environment_name() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_settings(environ={"DYNAMO_SERVER__HTTP_PROT": "1"})

    assert "environment DYNAMO_SERVER__HTTP_PROT" in caught.value.message
    assert caught.value.hint == "did you mean DYNAMO_SERVER__HTTP_PORT?"


def test_log_level_has_short_environment_names() -> None:
    both = {"RUST_LOG": "warn", "DYNAMO_LOG": "debug"}

    assert resolve_settings(environ={"RUST_LOG": "warn"}).settings.logging.level == "warn"
    assert resolve_settings(environ=both).settings.logging.level == "debug"
    assert (
        resolve_settings(environ={**both, "DYNAMO_LOGGING__LEVEL": "error"}).settings.logging.level
        == "error"
    )


def test_other_environment_names_are_ignored() -> None:
    assert (
        resolve_settings(environ={"DYNAMO_FRONTEND_SERVICE_PORT": "tcp://x"}).settings == Settings()
    )
