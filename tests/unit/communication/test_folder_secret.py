"""The secret of a discovery folder: who creates it, who gets it, and when it is refused."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dynamo.communication.discovery import open_discovery
from dynamo.communication.discovery.folder import FolderLease, FolderReader, prepare_root
from dynamo.communication.discovery.folder_secret import (
    SECRET_FILE,
    keep_secret,
    open_secret,
    remove_unused_secret,
)
from dynamo.communication.options import PlaneOptions, TlsFiles
from dynamo.core.errors import ConfigError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    prepare_root(tmp_path / "discovery")
    return tmp_path / "discovery"


def test_the_first_process_creates_a_private_secret(root: Path) -> None:
    secret = open_secret(root)
    assert len(secret) == 64
    assert (root / SECRET_FILE).stat().st_mode & 0o777 == 0o600
    assert open_secret(root) == secret
    assert [path.name for path in root.iterdir()] == [SECRET_FILE]


@pytest.mark.parametrize("mode", [0o775, 0o777])
def test_a_folder_that_others_can_write_to_is_closed_to_them(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    prepare_root(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_a_folder_that_all_users_share_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(ConfigError, match="other users can write") as caught:
        prepare_root(tmp_path)
    assert "file:PATH" in caught.value.hint
    assert tmp_path.stat().st_mode & 0o7777 == 0o1777


def test_a_lease_of_another_user_is_not_read(root: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder to another user")
    lease = FolderLease(root)
    lease.put("/a", b"")
    os.chown(lease.folder, 65534, 65534)
    reader = FolderReader(root)
    assert not reader.poll()
    reader.close()
    lease.close()


def test_processes_that_start_at_once_agree(root: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        for _ in range(25):
            assert len(set(threads.map(lambda _: open_secret(root), range(8)))) == 1
            (root / SECRET_FILE).unlink()


def test_processes_that_know_no_secret_are_joined_without_one(root: Path) -> None:
    """A deployment of an earlier version is replaced process by process."""
    earlier = FolderLease(root)
    assert open_secret(root) == ""
    assert not (root / SECRET_FILE).exists()
    later = FolderLease(root, open_secret(root))
    earlier.close()
    assert open_secret(root) == ""
    later.close()
    assert open_secret(root) != ""


def test_a_deleted_secret_comes_back_from_a_live_process(root: Path) -> None:
    secret = open_secret(root)
    lease = FolderLease(root, secret)
    (root / SECRET_FILE).unlink()
    assert open_secret(root) == secret
    remove_unused_secret(root)
    assert (root / SECRET_FILE).exists()
    lease.close()
    remove_unused_secret(root)
    assert not (root / SECRET_FILE).exists()


async def test_a_deleted_folder_gets_the_same_secret_again(root: Path) -> None:
    plane = await open_discovery(f"file:{root}")
    await plane.put("/a", b"")
    shutil.rmtree(root)
    await plane.put("/b", b"")
    assert open_secret(root) == plane.secret
    await plane.close()


def spoil_mode(path: Path) -> None:
    path.chmod(0o644)


def spoil_length(path: Path) -> None:
    path.write_text("short")


def spoil_type(path: Path) -> None:
    path.rename(path.with_name("target"))
    path.symlink_to(path.with_name("target"))


def spoil_owner(path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize("spoil", [spoil_mode, spoil_length, spoil_type, spoil_owner])
def test_a_secret_that_others_may_know_is_refused(
    root: Path, spoil: Callable[[Path], None]
) -> None:
    open_secret(root)
    spoil(root / SECRET_FILE)
    with pytest.raises(ConfigError, match="the secret") as caught:
        open_secret(root)
    assert "delete" in caught.value.hint


def test_a_full_disk_is_explained(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(ConfigError, match="cannot be written: No space left"):
        keep_secret(root, "x" * 64)
    assert not list(root.iterdir())


def test_a_full_disk_does_not_matter_to_later_processes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    secret = open_secret(root)
    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(os, "write", fail)
    assert keep_secret(root, open_secret(root)) == secret
    FolderLease(root, secret).close()


@pytest.mark.parametrize(
    "options", [PlaneOptions(secret="0123456789abcdef"), PlaneOptions(tls=TlsFiles(ca="ca"))]
)
async def test_a_configured_secret_or_certificate_needs_no_file(
    root: Path, options: PlaneOptions
) -> None:
    plane = await open_discovery(f"file:{root}", options)
    assert plane.secret == ""
    assert not (root / SECRET_FILE).exists()
    await plane.close()
