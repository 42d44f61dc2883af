"""Records on a full disk: spare files and folders are used in place of new ones."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamo.communication.discovery.disk_reserve import RESERVE_FOLDER, DiskReserve
from dynamo.communication.discovery.folder import FolderLease, FolderReader

FillDisk = Callable[[], None]


@pytest.fixture
def reserve(tmp_path: Path) -> DiskReserve:
    reserve = DiskReserve(tmp_path / RESERVE_FOLDER)
    assert reserve.fill()
    return reserve


@pytest.fixture
def fill_disk(monkeypatch: pytest.MonkeyPatch) -> FillDisk:
    """From its call on, no file can get content and no folder can be made."""

    def no_content(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def no_folder(path: Path, mode: int = 0o777, **_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill() -> None:
        monkeypatch.setattr(Path, "write_bytes", no_content)
        monkeypatch.setattr(Path, "mkdir", no_folder)

    return fill


@pytest.mark.usefixtures("reserve")
def test_a_lease_on_a_full_disk_uses_spare_files(tmp_path: Path, fill_disk: FillDisk) -> None:
    fill_disk()
    lease = FolderLease(tmp_path)
    lease.put("small", b"value")
    lease.put("large", bytes(20_000))
    reader = FolderReader(tmp_path)
    assert reader.poll() == {"small": b"value", "large": bytes(20_000)}
    reader.close()
    lease.close()


def test_a_used_reserve_is_filled_again(tmp_path: Path) -> None:
    reserve, folder = DiskReserve(tmp_path / RESERVE_FOLDER), tmp_path / RESERVE_FOLDER
    assert reserve.fill()
    complete = sorted(path.name for path in folder.iterdir())
    (folder / "file-3").unlink()
    (folder / "folder-0").rmdir()
    assert reserve.fill()
    assert sorted(path.name for path in folder.iterdir()) == complete


def test_an_exhausted_reserve_raises_and_leaves_no_file(
    tmp_path: Path, reserve: DiskReserve, fill_disk: FillDisk
) -> None:
    fill_disk()
    with pytest.raises(OSError, match="No space left"):
        reserve.write_file(tmp_path / "record", bytes(1 << 20))
    assert not (tmp_path / "record").exists()


def test_a_lease_that_does_not_fit_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fill_disk: FillDisk
) -> None:
    make_folder = Path.mkdir
    fill_disk()
    monkeypatch.setattr(Path, "mkdir", make_folder)
    with pytest.raises(OSError, match="No space left"):
        FolderLease(tmp_path)
    assert not list(tmp_path.iterdir())


def test_other_errors_do_not_use_the_reserve(tmp_path: Path, reserve: DiskReserve) -> None:
    with pytest.raises(FileNotFoundError):
        reserve.write_file(tmp_path / "missing" / "record", b"")
    assert reserve.fill()


def test_a_full_disk_is_reported(tmp_path: Path, fill_disk: FillDisk) -> None:
    fill_disk()
    assert not DiskReserve(tmp_path / RESERVE_FOLDER).fill()


def test_the_reserve_is_removed_completely(tmp_path: Path, reserve: DiskReserve) -> None:
    reserve.remove()
    assert list(tmp_path.iterdir()) == []
