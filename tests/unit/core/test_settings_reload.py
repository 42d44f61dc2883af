"""Changes of settings that are applied while serving."""

from __future__ import annotations

from msgspec.structs import replace

from dynamo.core.settings import Settings, resolve_settings
from dynamo.core.settings.keys import setting_specs_by_key
from dynamo.core.settings.reload import SettingChange, apply_reload

BASE = Settings()


def settings(text: str) -> Settings:
    return resolve_settings(document=(text, "a.yaml")).settings


def test_reloadable_changes_are_applied_and_all_are_reported() -> None:
    reloaded = settings(
        "logging: {level: debug}\nserver: {max_concurrent_requests: 5, stall_s: 9, http_port: 1}"
    )

    current, changes = apply_reload(BASE, reloaded)

    server = replace(BASE.server, max_concurrent_requests=5)
    assert current == replace(BASE, server=server, logging=replace(BASE.logging, level="debug"))
    assert {change.key: change.applied for change in changes} == {
        "server.http_port": False,
        "server.max_concurrent_requests": True,
        "server.stall_s": False,
        "logging.level": True,
    }


def test_equal_settings_have_no_changes() -> None:
    assert apply_reload(BASE, settings("logging: {level: info}")) == (BASE, ())


def test_changes_of_secrets_are_redacted() -> None:
    _, changes = apply_reload(BASE, settings("server: {api_keys: [swordfish]}"))

    assert changes == (SettingChange("server.api_keys", (), "***", applied=False),)


def test_log_level_and_limits_are_reloadable() -> None:
    safe = {key for key, spec in setting_specs_by_key().items() if spec.meta.reload}

    assert safe >= {
        "logging.level",
        "server.log_requests",
        "server.max_concurrent_requests",
        "server.max_waiting_requests",
        "server.request_timeout",
    }
