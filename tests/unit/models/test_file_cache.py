"""Files identified by content, the cache folder, and locks."""

import hashlib
import os
import threading

import pytest

from dynamo.core.errors import ModelUnavailable
from dynamo.models.file_cache import (
    FileRef,
    atomic_replacement,
    cache_dir,
    file_lock,
    file_ref,
    find_file,
    hash_file,
    store_file,
    store_hash,
    stored_hash,
)


def test_the_cache_folder_follows_the_environment(own_cache, monkeypatch, tmp_path):
    assert cache_dir("a", "b") == own_cache / "a" / "b"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home/.cache/dynamo"
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(ModelUnavailable) as caught:
        cache_dir()
    assert "XDG_CACHE_HOME" in caught.value.hint


def test_a_stored_hash_is_valid_until_the_file_changes(tmp_path):
    path = tmp_path / "big"
    path.write_bytes(b"content")
    assert stored_hash(path) is None
    store_hash(path, hash_file(path))
    assert stored_hash(path) == hashlib.sha256(b"content").hexdigest()
    path.write_bytes(b"CONTENT")
    os.utime(path, ns=(0, 5))
    assert stored_hash(path) is None


def test_files_are_found_by_content(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b"{}")
    ref = file_ref(path)
    assert find_file(ref) == path
    path.write_bytes(b"[]")
    assert find_file(ref) is None
    with pytest.raises(ModelUnavailable, match="damaged"):
        store_file(ref, b"[]")
    stored = store_file(ref, b"{}")
    assert find_file(ref) == stored
    assert stored.read_bytes() == b"{}"
    assert find_file(FileRef("../../evil", "0" * 64, 2)) is None
    assert store_file(FileRef("../evil", ref.sha256, 2), b"{}").parent == stored.parent
    with pytest.raises(ModelUnavailable, match="cannot be read"):
        file_ref(tmp_path / "none")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def fail() -> None:
        with atomic_replacement(path) as part:
            part.write_bytes(b"half")
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir() if "part" in file.name] == []


def test_a_lock_has_one_holder_at_a_time(tmp_path):
    order = []
    entered = threading.Event()

    def second() -> None:
        entered.set()
        with file_lock(tmp_path / "lock"):
            order.append("second")

    with file_lock(tmp_path / "lock"):
        other = threading.Thread(target=second)
        other.start()
        entered.wait()
        order.append("first")
    other.join()
    assert order == ["first", "second"]
