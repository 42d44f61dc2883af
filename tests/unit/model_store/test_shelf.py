"""The shelf: manifests that lie, budgets, full and read-only disks, and processes that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.support.fake_hub import COMMIT, running_hub

from dynamo.core.errors import ModelUnavailable
from dynamo.models.downloads.fetching import fetch_alone
from dynamo.models.downloads.sources import ModelSpec, parse_spec
from dynamo.models.shelf import shelf as shelf_module
from dynamo.models.shelf.manifest import (
    MAX_PIECES,
    PIECE_BYTES,
    Manifest,
    ManifestFile,
    decode_manifest,
    digest_of,
    encode_manifest,
)
from dynamo.models.shelf.partial import PartialModel
from dynamo.models.shelf.shelf import Shelf

FILE = ManifestFile("model.safetensors", 10)


@pytest.fixture(autouse=True)
def _no_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf_module, "_holds", {})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([ManifestFile("../model", 1)], "outside of its folder"),
        ([ManifestFile("/etc/model", 1)], "outside of its folder"),
        ([ManifestFile("a/../b", 1)], "outside of its folder"),
        ([ManifestFile(".manifest", 1)], "outside of its folder"),
        ([ManifestFile("a\nb", 1)], "outside of its folder"),
        ([FILE, FILE], "a file twice"),
        ([ManifestFile("model", -1)], "a negative size"),
        ([ManifestFile("model", 10**7 * PIECE_BYTES)], f"10000000 pieces, at most {MAX_PIECES}"),
        ([ManifestFile("model", 10, "abc")], "hashes of a wrong length"),
        ([ManifestFile("model", 10, "", b"x")], "hashes of a wrong length"),
        ([], "0 files"),
    ],
)
def test_a_manifest_that_lies_is_refused(files: list[ManifestFile], message: str) -> None:
    manifest = Manifest("model", "abc", tuple(files))
    with pytest.raises(ModelUnavailable, match=message) as caught:
        decode_manifest(encode_manifest(manifest), "peer 7")
    assert caught.value.message.startswith("peer 7 has a wrong manifest of model")
    with pytest.raises(ModelUnavailable, match="the commit"):
        decode_manifest(encode_manifest(Manifest("model", "../x", (FILE,))), "peer 7")
    with pytest.raises(ModelUnavailable, match="is not a manifest"):
        decode_manifest(b"\xc1", "peer 7")


def test_pieces_that_are_not_those_of_the_manifest_are_refused(tmp_path: Path) -> None:
    file = replace(FILE, digests=digest_of(b"0123456789"))
    partial = PartialModel.open(tmp_path / "part", Manifest("model", "abc", (file,)))
    for content in (b"0123456788", b"012345678", b"01234567890"):
        with pytest.raises(ValueError, match="damaged"):
            partial.write(0, [content])
    partial.write(0, [b"0123456789"])
    assert partial.is_complete
    assert partial.read(0) == b"0123456789"
    partial.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        partial.read(0)


def test_a_size_or_hash_that_lies_serves_nothing(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    wrong = replace(FILE, sha256="0" * 64)
    with shelf.lock_model("model"):
        partial = shelf.open_partial(Manifest("model", "abc", (wrong,)))
        partial.write(0, [b"0123456789"])
        with pytest.raises(ModelUnavailable, match="has not the hash that its source names"):
            shelf.finish(partial, "main")
        partial.close()
    assert shelf.find("model", "main") is None


def test_the_hashes_that_a_peer_told_do_not_outlive_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that was damaged has named the pieces of a download, and the hub continues it."""
    shelf = Shelf(tmp_path)
    lies = ManifestFile("model.safetensors", 10, "0" * 64, bytes(range(32)))
    with shelf.lock_model("org/model"):
        shelf.open_partial(Manifest("org/model", COMMIT, (lies,))).close()
    files = {"config.json": b"{}", "model.safetensors": b"0123456789"}
    with running_hub({"org/model": files}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        model = fetch_alone(ModelSpec("org/model"), shelf)
    assert (model.folder / "model.safetensors").read_bytes() == b"0123456789"


def store(shelf: Shelf, name: str, content: bytes) -> None:
    """Put a model of one file on a shelf."""
    manifest = Manifest(name, "abc", (ManifestFile("model.safetensors", len(content)),))
    with shelf.lock_model(name):
        partial = shelf.open_partial(manifest)
        partial.write(0, [content])
        shelf.finish(partial, "main")
        partial.close()


def release_all() -> None:
    for handle in shelf_module._holds.values():
        os.close(handle)
    shelf_module._holds.clear()


def test_a_budget_takes_what_was_not_used_for_long(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, budget_bytes=250)
    store(shelf, "old", b"o" * 100)
    store(shelf, "new", b"n" * 100)
    release_all()
    os.utime(tmp_path / "old" / "abc", (1, 1))
    store(shelf, "third", b"t" * 100)
    assert [model.manifest.name for model in shelf.models()] == ["new", "third"]
    assert shelf.find("new", "main") is not None
    with pytest.raises(ModelUnavailable, match=r"0\.00 GB are in use"):
        store(shelf, "fourth", b"f" * 100)
    with pytest.raises(ModelUnavailable, match="the budget of the model store") as caught:
        store(shelf, "large", b"l" * 300)
    assert "store.budget" in caught.value.hint
    assert {model.manifest.name for model in shelf.models()} == {"new", "third"}


def test_a_model_that_another_process_uses_is_not_removed(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    store(shelf, "model", b"x" * 10)
    release_all()
    code = (
        "import sys; from pathlib import Path; from dynamo.models.shelf.shelf import Shelf\n"
        "print(Shelf(Path(sys.argv[1])).find('model', 'main').folder, flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdout is not None
        assert user.stdout.readline()
        (model,) = shelf.models()
        with pytest.raises(ModelUnavailable, match="in use by a process"):
            shelf.remove(model)
        user.kill()
    shelf.remove(model)
    assert shelf.models() == []


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf(tmp_path)
    huge = ManifestFile("model.safetensors", 1 << 40)
    with pytest.raises(ModelUnavailable, match="no room for model"):
        shelf.open_partial(Manifest("model", "abc", (huge,)))

    def full(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    partial = shelf.open_partial(Manifest("model", "abc", (FILE,)))
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ModelUnavailable, match="No space left on device") as caught:
        partial.write(0, [b"0123456789"])
    assert "free disk space" in caught.value.hint
    partial.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_shelf_that_is_only_read_serves_what_it_has(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    store(shelf, "model", b"x" * 10)
    release_all()
    for path in (tmp_path / "model", tmp_path):
        path.chmod(0o500)
    try:
        assert shelf.find("model", "main") is not None
        with pytest.raises(ModelUnavailable, match="Permission denied"):
            store(shelf, "other", b"y")
    finally:
        for path in (tmp_path, tmp_path / "model"):
            path.chmod(0o700)


def test_a_folder_in_the_place_of_the_shelf_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelUnavailable, match="Not a directory"):
        store(Shelf(tmp_path / "file"), "other", b"y")


def test_a_file_that_changes_while_it_is_copied_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dynamo.models.downloads import fetching

    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes(b"{}")
    (source / "model.safetensors").write_bytes(b"a" * (PIECE_BYTES + 1))
    spec = parse_spec(f"file://{source}")
    assert spec is not None
    whole = fetching.fetch_piece

    def fetch_piece(*arguments: object) -> int:
        (source / "model.safetensors").write_bytes(b"b" * (PIECE_BYTES + 1))
        return whole(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fetching, "fetch_piece", fetch_piece)
    shelf = Shelf(tmp_path / "shelf")
    shelf.root.mkdir()
    with pytest.raises(ModelUnavailable, match="changed while it was fetched"):
        fetch_alone(spec, shelf)
    assert shelf.find(spec.name, spec.revision) is None
    monkeypatch.setattr(fetching, "fetch_piece", whole)
    model = fetch_alone(spec, shelf)
    assert (model.folder / "model.safetensors").read_bytes() == b"b" * (PIECE_BYTES + 1)


def test_ten_kills_in_a_row_cost_little(tmp_path: Path, weights: bytes) -> None:
    """A process that is killed during its download loses what is in the buffers of its
    sockets. The beginnings of pieces stay, of which three are read at a time."""
    content = weights * 2
    with running_hub({"org/model": {"model.safetensors": content, "config.json": b"{}"}}) as hub:
        hub.rate = 10_000_000
        environment = os.environ | {"HF_ENDPOINT": hub.url, "XDG_CACHE_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "dynamo", "pull", "org/model"]
        for number in range(10):
            process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
            while hub.sent_bytes < (number + 1) * len(content) / 12 and process.poll() is None:
                signal.sigtimedwait([], 0.01)
            process.kill()
            process.wait()
        hub.rate = 0
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60)
    assert hub.sent_bytes <= len(content) + 10 * PIECE_BYTES / 2
    (path,) = tmp_path.rglob("model.safetensors")
    assert path.read_bytes() == content


def test_two_processes_of_a_machine_fetch_once(tmp_path: Path, weights: bytes) -> None:
    with running_hub({"org/model": {"model.safetensors": weights, "config.json": b"{}"}}) as hub:
        environment = os.environ | {"HF_ENDPOINT": hub.url, "XDG_CACHE_HOME": str(tmp_path)}
        code = (
            "from dynamo.models.downloads.fetching import fetch_alone\n"
            "from dynamo.models.downloads.sources import ModelSpec\n"
            "from dynamo.models.shelf.shelf import Shelf\n"
            "print(fetch_alone(ModelSpec('org/model'), Shelf()).folder)"
        )
        command = [sys.executable, "-c", code]
        processes = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(3)
        ]
        folders = {process.communicate(timeout=60)[0] for process in processes}
    assert len(folders) == 1
    assert hub.sent_bytes <= len(weights) + 10_000


def test_the_name_of_a_revision_is_a_commit(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    store(shelf, "model", b"x" * 10)
    assert shelf.find("model", "abc") is not None
    assert shelf.find("model", "..") is None
    assert shelf.find("model", "other") is None
    assert parse_spec("model@v1.0/x") == ModelSpec("model", "v1.0/x")
