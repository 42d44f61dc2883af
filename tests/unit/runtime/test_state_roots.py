"""State roots: the folders that may hold deployments of a user."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.runtime.deployment import (
    STATE_ROOT_VARIABLE,
    deployment_of,
    live_deployments,
    report_unsafe_roots,
    state_roots,
)


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of all users instead of /tmp, whose state this user's earlier runs left."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr("dynamo.runtime.deployment._TEMPORARY_FOLDER", folder)
    return folder


def test_a_named_deployment_and_a_bad_name(temporary_folder: Path) -> None:
    settings = Settings()
    named = replace(settings, runtime=replace(settings.runtime, deployment="blue"))
    assert deployment_of(named, {}).folder == temporary_folder / f"dynamo-{os.getuid()}" / "blue"
    bad = replace(settings, runtime=replace(settings.runtime, deployment="../etc"))
    with pytest.raises(ConfigError):
        deployment_of(bad, {})


def test_the_state_roots_of_a_user(tmp_path: Path, temporary_folder: Path) -> None:
    roots = state_roots({"XDG_RUNTIME_DIR": str(tmp_path)})
    shared = temporary_folder / f"dynamo-{os.getuid()}"
    assert roots == [tmp_path / "dynamo", shared, Path.home() / ".cache/dynamo/run"]
    child = {"XDG_RUNTIME_DIR": str(tmp_path), STATE_ROOT_VARIABLE: str(tmp_path / "first")}
    assert state_roots(child)[0] == tmp_path / "first"


def make_linked_root(base: Path) -> None:
    (base / "target").mkdir(mode=0o700)
    (base / "dynamo").symlink_to(base / "target")


def make_file_root(base: Path) -> None:
    (base / "dynamo").touch()


def make_root_of_another_user(base: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder to another user")
    (base / "dynamo").mkdir(mode=0o700)
    os.chown(base / "dynamo", 65534, 65534)


def make_base_of_another_user(base: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder to another user")
    os.chown(base, 65534, 65534)


def make_writable_base(base: Path) -> None:
    base.chmod(0o777)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (make_linked_root, "it is a symbolic link"),
        (make_file_root, "it is not a folder"),
        (make_root_of_another_user, "it belongs to another user"),
        (make_base_of_another_user, "it could be replaced by other users"),
        (make_writable_base, "it could be replaced by other users"),
    ],
)
def test_an_unsafe_state_root_is_ignored_and_reported_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[Path], None],
    reason: str,
) -> None:
    base = tmp_path / "base"
    base.mkdir(mode=0o700)
    make(base)
    environ = {"XDG_RUNTIME_DIR": str(base)}
    assert base / "dynamo" not in state_roots(environ)
    assert deployment_of(Settings(), environ).folder.parent != base / "dynamo"
    for _ in range(2):
        live_deployments(environ)
        report_unsafe_roots(environ)
    (report,) = [text for text in caplog.messages if str(base) in text]
    assert report.startswith(f"the state folder {base}/dynamo is ignored: {reason}")


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o710])
def test_an_own_root_that_is_open_to_others_is_closed_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    root = tmp_path / "dynamo"
    root.mkdir()
    root.chmod(mode)
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    for _ in range(2):
        assert state_roots(environ)[0] == root
    assert root.stat().st_mode & 0o777 == 0o700
    assert [text for text in caplog.messages if str(root) in text] == [
        f"the folder {root} was open to other users and is closed to them now"
    ]


def test_without_a_safe_state_root_the_reasons_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dynamo.runtime.deployment._candidate_roots", lambda _: [tmp_path / "dynamo"]
    )
    make_linked_root(tmp_path)
    with pytest.raises(ConfigError, match=r"/dynamo is a symbolic link") as caught:
        deployment_of(Settings(), {})
    assert "XDG_RUNTIME_DIR" in caught.value.hint


def test_a_root_that_others_could_replace_is_better_than_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked, replaceable = tmp_path / "dynamo", tmp_path / "open" / "dynamo"
    make_linked_root(tmp_path)
    replaceable.parent.mkdir()
    replaceable.parent.chmod(0o777)
    roots = [linked, replaceable]
    monkeypatch.setattr("dynamo.runtime.deployment._candidate_roots", lambda _: roots)
    assert state_roots({}) == [replaceable]
