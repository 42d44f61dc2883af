"""Fetching of several models before the workers of a deployment start."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from dynamo.core.errors import ModelUnavailable
from dynamo.core.settings import Settings
from dynamo.services.model_store import preparation
from dynamo.services.model_store.preparation import make_preparation


def workers(*paths: str) -> list[Settings]:
    settings = Settings()
    return [replace(settings, model=replace(settings.model, path=path)) for path in paths]


@pytest.fixture(autouse=True)
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is on this host but `here`."""
    monkeypatch.setattr(
        preparation,
        "locate_model",
        lambda path: SimpleNamespace(path="/here" if path == "here" else None),
    )


def use_downloads(monkeypatch: pytest.MonkeyPatch, fetch: Any) -> None:
    monkeypatch.setattr(preparation, "resolve_model_blocking", fetch)


async def prepare(*paths: str) -> list[str]:
    """Fetch the models of workers; return the reported progress."""
    reports: list[str] = []
    fetch = make_preparation(workers(*paths), nullcontext(lambda *_: None))
    assert fetch is not None
    await fetch(reports.append)
    return reports


async def test_models_are_fetched_at_once_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both, fetched = threading.Barrier(2, timeout=10), list[str]()

    def fetch(path: str, progress: Any, **_: Any) -> None:
        both.wait()  # fails if the second model waits for the first
        for done in range(3):
            progress(path, done, 3)
        fetched.append(path)

    use_downloads(monkeypatch, fetch)
    reports = await prepare("a", "here", "b", "a")
    assert sorted(fetched) == ["a", "b"]
    assert [report for report in reports if "a (" in report] == [
        "the model is being prepared: a (0 %)"
    ]


async def test_a_model_that_cannot_be_fetched_stops_only_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetched: list[str] = []

    def fetch(path: str, *_: Any, **__: Any) -> None:
        if path == "a":
            raise ModelUnavailable("no such model")
        fetched.append(path)

    use_downloads(monkeypatch, fetch)
    await prepare("a", "b")
    assert fetched == ["b"]
    with pytest.raises(ModelUnavailable, match="no such model"):
        await prepare("a")


async def test_models_on_this_host_need_no_preparation() -> None:
    assert make_preparation(workers("here"), nullcontext(lambda *_: None)) is None
