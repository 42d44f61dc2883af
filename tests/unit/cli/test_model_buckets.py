"""`dynamo pull` from Google Cloud Storage and Azure Blob Storage."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fake_buckets import FakeBuckets, running_buckets

from dynamo.cli.store.command import PULL
from dynamo.core.errors import ModelUnavailable
from dynamo.models.downloads import fetching
from dynamo.models.location import locate_model
from dynamo.models.shelf.manifest import PIECE_BYTES

WEIGHTS = bytes(range(256)) * 1000 + b"w" * PIECE_BYTES
FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": WEIGHTS}
SCHEMES = ("gs", "az")
CLEARED = ("GOOGLE_", "AZURE_")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(CLEARED)]:
        monkeypatch.delenv(name)


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBuckets]:
    objects = {f"some/model/{name}": data for name, data in FILES.items()}
    with running_buckets(objects) as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_folder_of_a_bucket_is_fetched(scheme: str, buckets: FakeBuckets) -> None:
    url = f"{scheme}://models/some/model"
    assert PULL.run([url]) == 0
    path = locate_model(url).path
    assert path is not None
    for name, data in FILES.items():
        assert (path / name).read_bytes() == data


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_file_that_changes_under_its_name_is_not_used(
    scheme: str, buckets: FakeBuckets, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, whole = f"{scheme}://models/some/model", fetching.fetch_piece

    def fetch_piece(*arguments: object) -> int:
        buckets.objects["some/model/model.safetensors"] = WEIGHTS[::-1]
        return whole(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fetching, "fetch_piece", fetch_piece)
    with pytest.raises(ModelUnavailable, match="changed while it was fetched") as caught:
        PULL.run([url])
    assert "repeat the command" in caught.value.hint
    assert locate_model(url).path is None
    assert PULL.run([url]) == 0
    path = locate_model(url).path
    assert path is not None
    assert (path / "model.safetensors").read_bytes() == WEIGHTS[::-1]


@pytest.mark.parametrize(
    ("url", "refuses", "message", "hint"),
    [
        ("gs://models/none", False, "there is no model at", "safetensors"),
        ("az://models/none", False, "there is no model at", "safetensors"),
        ("gs://other/model", False, "the bucket other does not exist", "correct the name"),
        ("az://other/model", False, "the bucket other does not exist", "correct the name"),
        ("gs://models/some/model", True, "models is denied", "GOOGLE_SERVICE_ACCOUNT"),
        ("az://models/some/model", True, "models is denied", "AZURE_STORAGE_ACCOUNT_KEY"),
    ],
)
def test_what_is_wrong_with_a_bucket_is_said(
    url: str, refuses: bool, message: str, hint: str, buckets: FakeBuckets
) -> None:
    buckets.refuses = refuses
    with pytest.raises(ModelUnavailable, match=message) as caught:
        PULL.run([url])
    assert hint in caught.value.hint


def test_azure_without_an_account_says_what_is_missing() -> None:
    with pytest.raises(ModelUnavailable, match="there are no credentials") as caught:
        PULL.run(["az://models/some/model"])
    assert "AZURE_STORAGE_ACCOUNT_NAME" in caught.value.hint
    assert "169.254" not in str(caught.value)


def test_google_without_a_key_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients ask an address of the cloud then, which is in GCE_METADATA_HOST elsewhere."""
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    with pytest.raises(ModelUnavailable, match="there are no credentials") as caught:
        PULL.run(["gs://models/some/model"])
    assert "GOOGLE_SERVICE_ACCOUNT" in caught.value.hint
