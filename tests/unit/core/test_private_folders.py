"""Folders that only this user may enter."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo.core.host.private_folders import close_to_others, make_private


def test_each_folder_that_is_made_is_private(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there").chmod(0o755)
    make_private(tmp_path / "there" / "a" / "b")
    make_private(tmp_path / "there" / "a" / "b")
    assert [
        path.stat().st_mode & 0o777
        for path in (tmp_path / "there", tmp_path / "there/a", tmp_path / "there/a/b")
    ] == [0o755, 0o700, 0o700]


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "folder" / "below"):
        with pytest.raises(NotADirectoryError):
            make_private(path)


def test_a_folder_behind_a_link_is_not_closed(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target").chmod(0o755)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="link"):
        close_to_others(tmp_path / "link")
    assert (tmp_path / "target").stat().st_mode & 0o777 == 0o755
