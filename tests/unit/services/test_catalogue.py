"""The catalogue: which models are opened, and when they are opened again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from msgspec.structs import replace
from tests.unit.processes import Open

from dynamo.core.errors import ModelUnavailable
from dynamo.models.card import ModelCard
from dynamo.models.file_cache import FileRef
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.supervisors import SupervisorRecord, SupervisorView, supervisor_record_key
from dynamo.services.catalogue import (
    MODELS,
    Catalogue,
    incompatible_workers,
    majority_card,
    model_identity,
)
from dynamo.services.desired_models import DesiredModels

CARD = ModelCard(
    names=("org/tiny",),
    context_tokens=100,
    vocab_size=10,
    tokenizer=FileRef("tokenizer.json", "ab" * 32, 3, "/a"),
    created=1,
)
OTHER = replace(CARD, context_tokens=200, created=2)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0)


class CatalogueUser:
    """A catalogue with a record of its calls. The first `failures` openings fail."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self.runtime = runtime
        self.opened: list[ModelCard] = []
        self.not_open: list[tuple[str, str]] = []
        self.closed: list[str] = []
        self.failures = 0
        self.supervisors = SupervisorView(runtime.discovery, runtime.clock)
        self.desired = DesiredModels(self.supervisors, "dynamo")
        self.catalogue = Catalogue(
            runtime,
            self.desired,
            MODELS,
            self._open,
            self.closed.append,
            lambda *report: self.not_open.append(report),
        )
        runtime.tasks.start(self.supervisors.follow())
        runtime.tasks.start(self.catalogue.run())

    async def _open(self, card: ModelCard) -> None:
        if self.failures:
            self.failures -= 1
            raise ModelUnavailable("no worker offers its tokenizer")
        self.opened.append(card)

    async def supervise(self, *models: str) -> None:
        record = SupervisorRecord(models=dict.fromkeys(models, ()), namespace="dynamo")
        key = supervisor_record_key("supervisor-1")
        await self.runtime.discovery.put(key, msgspec.json.encode(record))

    async def announce(self, instance: str, card: ModelCard | None) -> None:
        key = f"/dynamo/models/org%2Ftiny/{instance}"
        if card is None:
            await self.runtime.discovery.delete(key)
        else:
            await self.runtime.discovery.put(key, msgspec.json.encode(card))

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture
async def user(open_runtime: Open) -> CatalogueUser:
    return CatalogueUser(await open_runtime())


async def test_a_model_is_opened_once_for_all_its_workers(user: CatalogueUser) -> None:
    await user.announce("a", CARD)
    await user.announce("b", replace(CARD, created=5))
    await until(lambda: user.opened)
    await user.announce("c", replace(CARD, tokenizer=replace(CARD.tokenizer, path="/b")))
    await user.settle()
    assert len(user.opened) == 1


async def test_workers_that_return_find_the_model_open(user: CatalogueUser) -> None:
    await user.announce("a", CARD)
    await until(lambda: user.opened)
    await user.announce("a", None)
    await user.settle()
    await user.announce("b", CARD)
    await user.settle()
    assert len(user.opened) == 1


async def test_another_card_replaces_the_model_when_its_last_worker_leaves(
    user: CatalogueUser,
) -> None:
    await user.announce("a", CARD)
    await until(lambda: user.opened)
    await user.announce("b", OTHER)
    await user.settle()
    assert len(user.opened) == 1
    await user.announce("a", None)
    await until(lambda: len(user.opened) == 2)
    assert user.opened[1] == OTHER


def test_the_majority_of_workers_decides_the_card() -> None:
    older, newer = replace(CARD, created=3), replace(OTHER, created=9)
    assert majority_card([CARD, newer, older]) == older
    assert majority_card([older, newer]) == newer
    assert majority_card([older, newer], older) == older


async def test_the_card_of_a_new_majority_replaces_the_model(
    user: CatalogueUser,
) -> None:
    await user.announce("a", CARD)
    await until(lambda: user.opened)
    await user.announce("b", OTHER)
    await user.settle()
    assert user.opened == [CARD]
    await user.announce("c", OTHER)
    await until(lambda: len(user.opened) == 2)
    await user.settle()
    assert user.opened == [CARD, OTHER]


async def test_a_failed_opening_is_retried(
    user: CatalogueUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.services.catalogue.RETRY_S", 0.001)
    user.failures = 2
    await user.announce("a", CARD)
    await until(lambda: user.opened)
    assert user.not_open == [("org/tiny", "no worker offers its tokenizer")] * 2


async def test_invalid_cards_are_skipped(user: CatalogueUser) -> None:
    await user.runtime.discovery.put("/dynamo/models/org%2Ftiny/x", b"{}")
    await user.announce("a", CARD)
    await until(lambda: user.opened)
    assert user.opened == [CARD]


def test_the_identity_ignores_fields_of_one_worker() -> None:
    assert model_identity(CARD) == model_identity(replace(CARD, created=9, source="elsewhere"))
    assert model_identity(CARD) != model_identity(OTHER)


async def test_workers_with_another_block_identity_are_reported(user: CatalogueUser) -> None:
    await user.announce("a", CARD)
    await until(lambda: user.opened)
    await user.settle()
    await user.announce("b", replace(CARD, block_tokens=32))
    await until(lambda: incompatible_workers(user.catalogue))
    assert incompatible_workers(user.catalogue) == {"b": "org/tiny: block tokens 32 instead of 16"}
    await user.announce("b", None)
    await until(lambda: not incompatible_workers(user.catalogue))


async def test_an_unreadable_card_hides_no_other(user: CatalogueUser) -> None:
    for instance, card in (("a", b"{"), ("b", b'{"names": ["\xff"]}')):
        await user.runtime.discovery.put(f"/dynamo/models/org%2Ftiny/{instance}", card)
    await user.settle()
    await user.announce("c", CARD)
    await until(lambda: user.opened)
    assert user.opened == [CARD]


async def test_a_model_that_its_supervisor_drops_is_closed_and_not_opened_again(
    user: CatalogueUser,
) -> None:
    await user.supervise("org/tiny", "other")
    await user.announce("w1", CARD)
    await until(lambda: len(user.opened) == 1)
    await user.supervise("other")
    await until(lambda: user.closed == ["org/tiny"])
    await user.announce("w2", CARD)
    await user.settle()
    assert len(user.opened) == 1

    await user.announce("w1", None)
    await user.announce("w2", None)
    await user.supervise("org/tiny", "other")
    await user.announce("w3", CARD)
    await until(lambda: len(user.opened) == 2)


async def test_a_model_stays_open_when_its_supervisor_is_gone(user: CatalogueUser) -> None:
    await user.supervise("org/tiny")
    await user.announce("w1", CARD)
    await until(lambda: len(user.opened) == 1)
    await user.runtime.discovery.delete(supervisor_record_key("supervisor-1"))
    await user.announce("w1", None)
    await user.settle()

    assert not user.closed
    assert list(user.desired.aliases) == ["org/tiny"]
