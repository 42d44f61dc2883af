"""The report on a fault, without a deployment."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.core.settings import SourcedValue, resolve_settings
from dynamo.core.settings.explain import changed_settings
from dynamo.operations.report import collect, write_archive


def test_without_a_deployment_versions_and_origins_are_told() -> None:
    flags = {
        "server.api_keys": SourcedValue("sk-planted-key-5", "flag --server.api_keys"),
        "router.mode": SourcedValue("kv", "flag --router-mode"),
    }
    files = collect(None, resolve_settings(flags, {}))
    assert "no deployment of this user runs" in files["missing.txt"]
    assert '"flag --router-mode"' in files["origins.json"]
    assert "sk-planted-key-5" not in str(files)
    assert '"python"' in files["versions.json"]


def test_settings_that_are_no_defaults_are_shown_without_secrets() -> None:
    loaded = resolve_settings(
        {
            "security.secret": SourcedValue("planted-word-9", "flag"),
            "models": SourcedValue(
                [
                    {
                        "path": SourcedValue("m", "flag"),
                        "engine.url_key": SourcedValue("planted-key-8", "flag"),
                    }
                ],
                "flag",
            ),
        },
        {},
    )
    changed = changed_settings(loaded.settings)
    assert changed["models[0].path"] == "m"
    assert changed["security.secret"] == "***"
    assert "planted" not in str(changed)


def test_a_file_that_cannot_be_written_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file") as caught:
        write_archive(str(tmp_path / "no" / "report.tar.gz"), {})
    assert caught.value.hint
