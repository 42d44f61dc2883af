"""Errors in a user's module are reported with file and line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.services.deployment.user_service import load_service


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ndef f(:\n", r"invalid syntax \(.*broken_service\.py:2\)"),
        ("x = 1\ny = 1 / 0\n", r"ZeroDivisionError: .*broken_service\.py:2\)"),
        ("import no_such_module\n", r"no_such_module.*broken_service\.py:1\)"),
    ],
)
def test_a_broken_module_is_reported_with_its_line(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "broken_service.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_service("broken_service:A", str(tmp_path))
    assert "broken_service" not in sys.modules
