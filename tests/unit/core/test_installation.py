"""The command in hints for missing libraries."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo.communication.backends import EXTRAS, load_backend
from dynamo.core import installation
from dynamo.core.errors import ConfigError, Unsupported
from dynamo.core.installation import install_command
from dynamo.core.plugins import DISCOVERY_BACKENDS
from dynamo.operations.plotting import check_matplotlib

ROOT = Path(__file__).parents[3]


def test_a_checkout_is_installed_as_such() -> None:
    words = shlex.split(install_command("etcd"))

    assert words == [sys.executable, "-m", "pip", "install", "--editable", f"{ROOT}[etcd]"]
    assert shlex.split(install_command())[-1] == str(ROOT)


def test_pip_accepts_the_command() -> None:
    offline = ["--dry-run", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    ended = subprocess.run(
        [*shlex.split(install_command("s3")), *offline], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "does not provide the extra" not in ended.stderr


def test_an_installed_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        installation, "__file__", "/opt/lib/python3/site-packages/dynamo/core/installation.py"
    )
    assert shlex.split(install_command("s3"))[-1] == "dynamo-python[s3]"


@pytest.mark.parametrize(
    ("uv", "start"),
    [
        ("/opt/uv", ["/opt/uv", "pip", "install", "--python", sys.executable]),
        (None, [sys.executable, "-m", "ensurepip", "&&", sys.executable, "-m", "pip", "install"]),
    ],
)
def test_environments_without_pip(
    uv: str | None, start: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "has_pip", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda _: uv)
    assert shlex.split(install_command("s3"))[: len(start)] == start


def test_finders_are_not_asked_for_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = list[str]()

    class Finder:
        """As that of setuptools, which hides its distutils from whoever asks for pip."""

        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            searches.append(name)

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    assert " -m pip install " in install_command("s3")
    assert searches == []


def test_missing_libraries_name_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("aetcd", "matplotlib", "dynamo.communication.discovery.etcd_client"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "dynamo.communication.discovery.etcd_client")
    monkeypatch.delitem(sys.modules, "dynamo.communication.discovery.etcd", raising=False)
    with pytest.raises(ConfigError, match="needs the library") as missing:
        load_backend(DISCOVERY_BACKENDS, "etcd://127.0.0.1:1")
    assert missing.value.hint == install_command(EXTRAS["etcd"])
    with pytest.raises(Unsupported) as missing_plots:
        check_matplotlib("or: ")
    assert missing_plots.value.hint == f"or: {install_command('bench')}"
