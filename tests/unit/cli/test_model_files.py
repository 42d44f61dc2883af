"""`dynamo pull`, `list`, `rm` and `store` with a server that has the hub's API, and with a bucket."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from socketserver import BaseRequestHandler, TCPServer

import pytest
from tests.support.fake_hub import FakeHub, running_hub
from tests.support.servers import S3Process

from dynamo.__main__ import main
from dynamo.cli.store.command import LIST, PULL, REMOVE, STORE, VERIFY
from dynamo.core.errors import ModelUnavailable
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import ModelSettings
from dynamo.inference.engines.choice import choose_engine
from dynamo.models.downloads import fetching
from dynamo.models.downloads.bucket import open_bucket
from dynamo.models.location import locate_model
from dynamo.models.shelf import shelf as shelf_module

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


@pytest.fixture(autouse=True)
def _fresh_shelf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(shelf_module, "_holds", {})
    for name in ("HF_TOKEN", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running_hub({name: dict(files) for name, files in REPOSITORIES.items()}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def release_holds() -> None:
    """Let go of the models that this process uses, as its end does."""
    import os

    for handle in shelf_module._holds.values():
        os.close(handle)
    shelf_module._holds.clear()


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
    with pytest.raises(ModelUnavailable, match="in use"):
        REMOVE.run([spec])
    release_holds()
    REMOVE.run([spec])
    LIST.run([])
    assert FOLDER not in capsys.readouterr().out.partition("are free")[2]
    with pytest.raises(ModelUnavailable, match="no fetched model"):
        REMOVE.run([spec])


def test_a_gguf_file_is_named_by_its_quantisation(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{FILES}:q4_k_m"
    assert locate_model(name).path is None
    PULL.run([name])
    location = locate_model(f"hf.co/{name}")
    assert (location.kind, location.name) == ("file", f"{FILES}:Q4_K_M")
    assert location.path is not None
    assert location.path.name == "some-Q4_K_M.gguf"
    assert not any("Q8_0" in path for _, path, _ in hub.requests)
    PULL.run([f"{FILES}:Q2_K"])
    parts = locate_model(f"{FILES}:Q2_K").path
    assert parts is not None
    assert parts.name == "some-Q2_K-00001-of-00002.gguf"
    LIST.run([])
    assert {f"{FILES}:Q4_K_M", f"{FILES}:Q2_K"} <= {*capsys.readouterr().out.split()}
    release_holds()
    STORE.run(["remove", f"{FILES}:Q2_K"])
    assert locate_model(name).path == location.path
    assert locate_model(f"{FILES}:Q2_K").path is None


def test_a_download_that_was_cut_goes_on(hub: FakeHub, tmp_path: Path) -> None:
    hub.cut["model.safetensors"] = 150_000
    PULL.run([FOLDER])
    starts = [span for kind, path, span in hub.requests if kind == "GET" and "safetens" in path]
    assert starts == ["bytes=0-199999", "bytes=150000-199999"]
    path = next(tmp_path.rglob("model.safetensors"))
    assert path.read_bytes() == WEIGHTS


def test_a_busy_hub_is_asked_again_when_it_says(hub: FakeHub) -> None:
    hub.busy = ["0", "0", "0"]
    PULL.run([FOLDER])
    assert locate_model(FOLDER).path is not None


@pytest.mark.parametrize(
    ("spec", "message", "hint"),
    [
        (f"{FILES}:Q9", "no GGUF file of Q9", f"{FILES}:Q2_K; it has Q2_K, Q4_K_M, Q8_0"),
        (FILES, "no weights in safetensors", f"{FILES}:Q2_K"),
        ("org/none", "no file, folder or hub model", "HF_TOKEN"),
        (f"{FOLDER}@v9", "the revision v9", "commits/main"),
        ("s3://bucket/model", "no credentials", "AWS_ACCESS_KEY_ID"),
        ("ftp://host/model", "no model can be fetched from ftp://", "s3://, gs://, az://, file://"),
        ("file:///no/such/folder", "there is no model", "safetensors"),
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


@pytest.mark.parametrize(
    ("token", "gated", "message", "hint"),
    [
        ("", True, "org/folder is gated", "accept its licence"),
        ("", False, "no file, folder or hub model", "HF_TOKEN"),
        ("wrong-token", False, "refuses the token for org/folder", "settings/tokens"),
    ],
)
def test_a_missing_or_refused_token_is_reported(
    token: str, gated: bool, message: str, hint: str, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token, hub.gated = "right-token", gated
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ModelUnavailable, match=message) as caught:
        PULL.run([FOLDER])
    assert hint in caught.value.hint
    assert "wrong-token" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "right-token")
    PULL.run([FOLDER])


def test_a_budget_below_the_model_is_reported_before_the_first_byte(hub: FakeHub) -> None:
    with pytest.raises(ModelUnavailable, match="the budget of the model store is") as caught:
        PULL.run([FOLDER, "--store.budget", "100KB"])
    assert "raise store.budget" in caught.value.hint
    assert not any("safetensors" in path for _, path, _ in hub.requests)
    assert locate_model(FOLDER).path is None


def test_a_shelf_that_cannot_be_written_is_reported(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self/fdinfo")  # nobody may create files there
    with pytest.raises(ModelUnavailable, match="cannot be written") as caught:
        PULL.run([FOLDER])
    assert "XDG_CACHE_HOME" in caught.value.hint


@pytest.mark.parametrize("arguments", [["ftp://host/model"], ["org/none"], [f"{FOLDER}@v9"]])
def test_what_a_user_named_wrongly_is_two_lines(
    arguments: list[str], hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", *arguments]) != 0
    problem, hint = capsys.readouterr().err.strip().splitlines()
    assert problem.startswith("error: ")
    assert hint.startswith("hint: ")


def test_a_commit_that_vanishes_meanwhile_is_reported(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fetching.fetch_piece

    def fetch_piece(*arguments: object) -> int:
        hub.commit = "d" * 40
        return whole(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fetching, "fetch_piece", fetch_piece)
    with pytest.raises(ModelUnavailable, match="has not, or no longer"):
        PULL.run([FOLDER])
    monkeypatch.setattr(fetching, "fetch_piece", whole)
    PULL.run([FOLDER])
    path = locate_model(FOLDER).path
    assert path is not None
    assert path.name == "d" * 40


def test_a_damaged_file_is_not_used_and_fetched_again(hub: FakeHub) -> None:
    sound = hub.repositories[FOLDER]["model.safetensors"]
    PULL_ERRORS = "has not the hash that its source names"
    damaged = bytearray(sound)
    damaged[1000] ^= 1
    hub.damaged["model.safetensors"] = bytes(damaged)
    with pytest.raises(ModelUnavailable, match=PULL_ERRORS):
        PULL.run([FOLDER])
    assert locate_model(FOLDER).path is None
    hub.damaged.clear()
    PULL.run([FOLDER])
    path = locate_model(FOLDER).path
    assert path is not None
    assert (path / "model.safetensors").read_bytes() == WEIGHTS


def test_a_name_is_brought_up_to_date(hub: FakeHub) -> None:
    PULL.run([FOLDER])
    first = locate_model(FOLDER).path
    hub.commit = "d" * 40
    hub.repositories[FOLDER]["model.safetensors"] = b"v" * 10
    assert locate_model(FOLDER).path == first
    PULL.run([FOLDER])
    second = locate_model(FOLDER).path
    assert first is not None
    assert second is not None
    assert (second / "model.safetensors").read_bytes() == b"v" * 10
    assert locate_model(f"{FOLDER}@{first.name}").path == first


def test_what_is_here_needs_no_hub(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    PULL.run([FOLDER])
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert PULL.run([FOLDER]) == 0
    assert "the present files stay" in capsys.readouterr().err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert PULL.run([FOLDER]) == 0
    with pytest.raises(ModelUnavailable, match="the model store is offline"):
        PULL.run([f"{FILES}:Q8_0"])


def test_models_that_are_not_on_the_shelf_are_named_with_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "models--org--other" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (snapshot / name).write_bytes(b"{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    LIST.run([])
    assert "org/other" in capsys.readouterr().out
    with pytest.raises(ModelUnavailable, match="org/other is not on the shelf") as caught:
        REMOVE.run(["org/other"])
    assert str(snapshot) in caught.value.hint
    assert VERIFY.run([]) == 0
    assert "nothing to check" in capsys.readouterr().out


def test_verify_finds_damage_and_removes_the_model(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    PULL.run([FOLDER])
    assert VERIFY.run([]) == 0
    assert f"{FOLDER} is sound: 3 files" in capsys.readouterr().out
    path = locate_model(FOLDER).path
    assert path is not None
    release_holds()
    with (path / "model.safetensors").open("r+b") as file:
        file.write(b"x")
    assert STORE.run(["verify", FOLDER]) == 1
    assert "is damaged: model.safetensors" in capsys.readouterr().out
    assert locate_model(FOLDER).path is None


def test_the_engine_of_a_model_on_the_hub_is_chosen_by_its_small_files(hub: FakeHub) -> None:
    with pytest.raises(ModelUnavailable, match="no engine serves org/folder"):
        choose_engine(Settings(model=ModelSettings(path=FOLDER)))
    with pytest.raises(ModelUnavailable, match="no weights in safetensors") as caught:
        choose_engine(Settings(model=ModelSettings(path=FILES)))
    assert f"{FILES}:Q2_K" in caught.value.hint
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
    assert locate_model(bucket).path is None

    assert PULL.run([bucket]) == 0

    assert "3 files" in capsys.readouterr().err
    location = locate_model(bucket)
    assert location.kind == "folder"
    assert location.path is not None
    assert (location.path / "model.safetensors").read_bytes() == WEIGHTS
    assert PULL.run([bucket]) == 0
    assert "to fetch" not in capsys.readouterr().err
    LIST.run([])
    assert bucket in capsys.readouterr().out
    release_holds()
    REMOVE.run([bucket])
    assert locate_model(bucket).path is None


def test_a_file_of_a_bucket_is_fetched_alone(bucket: str) -> None:
    url = f"{bucket}/some-Q8_0.gguf"
    assert PULL.run([url]) == 0
    location = locate_model(url)
    assert (location.kind, location.name) == ("file", "some-Q8_0")
    assert location.path is not None
    assert [path.name for path in location.path.parent.glob("[!.]*")] == ["some-Q8_0.gguf"]


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
def test_an_unreachable_hub_is_reported_at_once(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class RefusingServer(BaseRequestHandler):
        """Closes each connection without an answer."""

        def handle(self) -> None:
            connections.append(self.client_address)

    connections: list[object] = []
    with TCPServer(("127.0.0.1", 0), RefusingServer) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}"
            monkeypatch.setenv("HF_ENDPOINT", url)
            with pytest.raises(ModelUnavailable, match="the hub cannot be reached"):
                PULL.run([spec])
        finally:
            server.shutdown()
    assert 1 <= len(connections) <= 2
