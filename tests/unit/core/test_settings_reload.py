"""Which differences between two settings may be applied while serving."""

from __future__ import annotations

from msgspec.structs import replace

from dynamo.core.settings import Settings, resolve_settings
from dynamo.core.settings.keys import setting_specs_by_key
from dynamo.core.settings.reload import SettingChange, apply_reload

BASE = Settings()


def settings(text: str) -> Settings:
    return resolve_settings(document=(text, "a.yaml")).settings


def test_what_is_safe_is_taken_and_the_rest_told() -> None:
    wanted = settings(
        "logging: {level: debug}\nserver: {max_concurrent_requests: 5, stall_s: 9, http_port: 1}"
    )

    now, changes = apply_reload(BASE, wanted)

    server = replace(BASE.server, max_concurrent_requests=5)
    assert now == replace(BASE, server=server, logging=replace(BASE.logging, level="debug"))
    assert {one.key: one.applied for one in changes} == {
        "server.http_port": False,
        "server.max_concurrent_requests": True,
        "server.stall_s": False,
        "logging.level": True,
    }


def test_no_difference_is_no_change() -> None:
    assert apply_reload(BASE, settings("logging: {level: info}")) == (BASE, ())


def test_secrets_are_not_shown() -> None:
    _, changes = apply_reload(BASE, settings("server: {api_keys: [swordfish]}"))

    assert changes == (SettingChange("server.api_keys", "***", "***", applied=False),)


def test_log_level_and_limits_may_change() -> None:
    safe = {key for key, one in setting_specs_by_key().items() if one.meta.reload}

    assert safe >= {
        "logging.level",
        "server.log_requests",
        "server.max_concurrent_requests",
        "server.max_waiting_requests",
        "server.request_timeout",
    }
