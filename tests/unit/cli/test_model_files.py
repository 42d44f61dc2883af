"""`dynamo pull`, `list` and `rm` with a server that has the hub's API."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from socketserver import BaseRequestHandler, TCPServer

import pytest
from tests.support.fake_hub import FakeHub, running_hub
from tests.support.servers import S3Process

from dynamo.cli.models.files import LIST, PULL, REMOVE
from dynamo.core.errors import ModelUnavailable
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import ModelSettings
from dynamo.inference.engines.choice import choose_engine
from dynamo.models.downloads.bucket import fetch, open_bucket, place_of, planned_files
from dynamo.models.location import locate_model

FOLDER, FILES = "org/folder", "org/some-GGUF"
WEIGHTS = b"w" * 200_000
REPOSITORIES = {
    FOLDER: {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model.safetensors": WEIGHTS,
        "pytorch_model.bin": b"p" * 10,
    },
    FILES: {
        "some-Q4_K_M.gguf": b"4" * 1000,
        "some-Q8_0.gguf": b"8" * 2000,
        "Q2_K/some-Q2_K-00001-of-00002.gguf": b"2" * 500,
        "Q2_K/some-Q2_K-00002-of-00002.gguf": b"2" * 501,
    },
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with running_hub(REPOSITORIES) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            server.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield server


@pytest.mark.parametrize("spec", [FOLDER, f"hf.co/{FOLDER}", f"https://huggingface.co/{FOLDER}/"])
def test_a_folder_is_fetched_listed_and_removed(
    spec: str, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert PULL.run([spec]) == 0
    printed = capsys.readouterr()
    assert "3 files, 0 MB; 0 MB to fetch" in printed.err
    assert f"dynamo run {FOLDER}\n" in printed.out
    assert not any("pytorch_model" in path for _, path, _ in hub.requests)
    LIST.run([])
    assert FOLDER in capsys.readouterr().out
    REMOVE.run([spec])
    LIST.run([])
    assert FOLDER not in capsys.readouterr().out.partition("are free")[2]
    with pytest.raises(ModelUnavailable, match="no fetched model"):
        REMOVE.run([spec])


def test_a_gguf_file_is_named_by_its_quantisation(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{FILES}:q4_k_m"
    with pytest.raises(ModelUnavailable, match="not on this machine") as caught:
        locate_model(name)
    assert caught.value.hint == f"dynamo pull {name} fetches it"
    PULL.run([name])
    location = locate_model(f"hf.co/{name}")
    assert (location.kind, location.name) == ("file", name)
    assert location.path is not None
    assert location.path.name == "some-Q4_K_M.gguf"
    assert not any("Q8_0" in path for _, path, _ in hub.requests)
    PULL.run([f"{FILES}:Q2_K"])
    parts = locate_model(f"{FILES}:Q2_K").path
    assert parts is not None
    assert parts.name == "some-Q2_K-00001-of-00002.gguf"
    LIST.run([])
    assert {f"{FILES}:Q4_K_M", f"{FILES}:Q2_K"} <= {*capsys.readouterr().out.split()}
    REMOVE.run([f"{FILES}:Q2_K"])
    assert locate_model(name).path == location.path
    with pytest.raises(ModelUnavailable, match="not on this machine"):
        locate_model(f"{FILES}:Q2_K")


def test_a_download_that_was_ended_goes_on(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 50_000)
    hub.cut["model.safetensors"] = 150_000
    PULL.run([FOLDER])
    starts = [span for kind, path, span in hub.requests if kind == "GET" and "safetens" in path]
    assert starts[-1] == "bytes=150000-"
    path = next(tmp_path.rglob("model.safetensors"))
    assert path.read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("spec", "message", "hint"),
    [
        (f"{FILES}:Q9", "no GGUF file of Q9", f"{FILES}:Q2_K; it has Q2_K, Q4_K_M, Q8_0"),
        (FILES, "no weights in safetensors", f"{FILES}:Q2_K"),
        ("org/none", "no file, folder or hub model", "HF_TOKEN"),
        ("s3://bucket/model", "no credentials", "AWS_ACCESS_KEY_ID"),
        ("./none", "no name on the hub", "ORGANISATION/NAME"),
    ],
)
def test_wrong_names_are_reported_before_anything_is_fetched(
    spec: str, message: str, hint: str, hub: FakeHub
) -> None:
    with pytest.raises(ModelUnavailable, match=message) as caught:
        PULL.run([spec])
    assert hint in caught.value.hint
    assert not any("resolve" in path for _, path, _ in hub.requests)


def test_the_engine_of_a_model_on_the_hub_is_chosen_by_its_small_files(hub: FakeHub) -> None:
    with pytest.raises(ModelUnavailable, match="no engine serves org/folder"):
        choose_engine(Settings(model=ModelSettings(path=FOLDER)))
    with pytest.raises(ModelUnavailable, match=r"no config\.json") as caught:
        choose_engine(Settings(model=ModelSettings(path=FILES)))
    assert f"dynamo pull {FILES}:" in caught.value.hint
    assert not any("safetensors" in path or "gguf" in path for _, path, _ in hub.requests)


def test_a_hub_that_answers_wrongly_is_reported(hub: FakeHub) -> None:
    hub.repositories = {"org/broken": {}}
    with pytest.raises(ModelUnavailable, match="no weights in safetensors"):
        PULL.run(["org/broken"])
    hub.broken = True
    with pytest.raises(ModelUnavailable, match="cannot be fetched from the hub") as caught:
        PULL.run(["org/broken"])
    assert "repeat the command" in caught.value.hint


def test_a_path_is_here_already(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PULL.run([str(tmp_path)])
    assert f"dynamo run {tmp_path}" in capsys.readouterr().out


@pytest.fixture
def bucket(s3_server: S3Process, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The URL of a folder with a model and a GGUF file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in s3_server.environ.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{s3_server.bucket}/models/{tmp_path.name}"
    store = open_bucket(url, timeout_s=30.0, connect_s=30.0, retry_s=30.0)
    for name, content in (REPOSITORIES[FOLDER] | {"some-Q8_0.gguf": b"8" * 2000}).items():
        store.put(name, content)
    return url


def test_a_model_of_a_bucket_is_fetched_listed_and_removed(
    bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelUnavailable, match="not on this machine") as caught:
        locate_model(bucket)
    assert caught.value.hint == f"dynamo pull {bucket} fetches it"

    assert PULL.run([bucket]) == 0

    assert "3 files" in capsys.readouterr().err
    location = locate_model(bucket)
    assert location.kind == "folder"
    assert location.path is not None
    assert (location.path / "model.safetensors").read_bytes() == WEIGHTS
    assert PULL.run([bucket]) == 0
    assert "; 0 MB to fetch" in capsys.readouterr().err
    LIST.run([])
    assert bucket in capsys.readouterr().out
    REMOVE.run([bucket])
    with pytest.raises(ModelUnavailable, match="not on this machine"):
        locate_model(bucket)


def test_a_file_of_a_bucket_is_fetched_alone(bucket: str) -> None:
    url = f"{bucket}/some-Q8_0.gguf"
    assert PULL.run([url]) == 0
    location = locate_model(url)
    assert (location.kind, location.name) == ("file", "some-Q8_0")
    assert location.path is not None
    assert [path.name for path in location.path.parent.glob("[!.]*")] == ["some-Q8_0.gguf"]


def test_a_download_from_a_bucket_goes_on(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.models.downloads.bucket.READ_BYTES", 50_000)
    files = planned_files(bucket)
    seen: list[int] = []

    def stop_at_half(activity: str, done: int, total: int) -> None:
        if done >= total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(bucket, files, stop_at_half)
    fetch(bucket, files, lambda activity, done, total: seen.append(done))

    assert seen[0] >= len(WEIGHTS) / 2
    path = place_of(bucket) / "model.safetensors"
    assert path.read_bytes() == WEIGHTS
    assert not list(path.parent.glob(".*.part"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda url: url + "-other", "there is no model at"),
        (lambda url: url.replace("kv-blocks", "no-such-bucket"), "no-such-bucket"),
        (lambda url: "s3://", "names no model"),
        (lambda url: url + "/../x", "names no model"),
        (lambda url: url.replace("s3://", "s3://user:secret@"), "a user or a password"),
    ],
)
def test_a_wrong_url_of_a_bucket_is_refused(
    bucket: str, change: Callable[[str], str], message: str
) -> None:
    with pytest.raises(ModelUnavailable, match=message) as caught:
        PULL.run([change(bucket)])
    assert caught.value.hint
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("spec", [FOLDER, f"{FILES}:Q8_0"])
def test_an_unreachable_hub_is_reported_at_once(
    spec: str, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    class RefusingServer(BaseRequestHandler):
        """Closes each connection without an answer."""

        def handle(self) -> None:
            connections.append(self.client_address)

    connections: list[object] = []
    with TCPServer(("127.0.0.1", 0), RefusingServer) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}"
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
            with pytest.raises(ModelUnavailable, match="the hub cannot be reached"):
                PULL.run([spec])
        finally:
            server.shutdown()
    assert 1 <= len(connections) <= 2
