"""Which models are opened, and when again."""

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
from dynamo.services.catalogue import Catalogue, majority_card, model_identity

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


class Frontend:
    """A catalogue and what it asked for; `fail`: so often opening fails first."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self.runtime = runtime
        self.opened: list[ModelCard] = []
        self.told: list[tuple[str, str]] = []
        self.fail = 0
        self.catalogue = Catalogue(runtime, self._open, lambda *told: self.told.append(told))
        runtime.tasks.start(self.catalogue.run())

    async def _open(self, card: ModelCard) -> None:
        if self.fail:
            self.fail -= 1
            raise ModelUnavailable("no worker offers its tokenizer")
        self.opened.append(card)

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
async def frontend(open_runtime: Open) -> Frontend:
    return Frontend(await open_runtime())


async def test_a_model_is_opened_once_for_all_its_workers(frontend: Frontend) -> None:
    await frontend.announce("a", CARD)
    await frontend.announce("b", replace(CARD, created=5))
    await until(lambda: frontend.opened)
    await frontend.announce("c", replace(CARD, tokenizer=replace(CARD.tokenizer, path="/b")))
    await frontend.settle()
    assert len(frontend.opened) == 1


async def test_workers_that_come_back_find_it_open(frontend: Frontend) -> None:
    await frontend.announce("a", CARD)
    await until(lambda: frontend.opened)
    await frontend.announce("a", None)
    await frontend.settle()
    await frontend.announce("b", CARD)
    await frontend.settle()
    assert len(frontend.opened) == 1


async def test_another_model_under_the_name_replaces_it_with_its_last_worker(
    frontend: Frontend,
) -> None:
    await frontend.announce("a", CARD)
    await until(lambda: frontend.opened)
    await frontend.announce("b", OTHER)
    await frontend.settle()
    assert len(frontend.opened) == 1
    await frontend.announce("a", None)
    await until(lambda: len(frontend.opened) == 2)
    assert frontend.opened[1] == OTHER


def test_most_workers_decide_what_a_model_is() -> None:
    older, newer = replace(CARD, created=3), replace(OTHER, created=9)
    assert majority_card([CARD, newer, older]) == older
    assert majority_card([older, newer]) == newer
    assert majority_card([older, newer], model_identity(older)) == older


async def test_what_most_workers_have_come_to_announce_replaces_the_rest(
    frontend: Frontend,
) -> None:
    await frontend.announce("a", CARD)
    await until(lambda: frontend.opened)
    await frontend.announce("b", OTHER)
    await frontend.settle()
    assert frontend.opened == [CARD]
    await frontend.announce("c", OTHER)
    await until(lambda: len(frontend.opened) == 2)
    await frontend.settle()
    assert frontend.opened == [CARD, OTHER]


async def test_opening_is_tried_again(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.services.catalogue.RETRY_S", 0.001)
    frontend.fail = 2
    await frontend.announce("a", CARD)
    await until(lambda: frontend.opened)
    assert frontend.told == [("org/tiny", "no worker offers its tokenizer")] * 2


async def test_bad_cards_are_skipped(frontend: Frontend) -> None:
    await frontend.runtime.discovery.put("/dynamo/models/org%2Ftiny/x", b"{}")
    await frontend.announce("a", CARD)
    await until(lambda: frontend.opened)
    assert frontend.opened == [CARD]


def test_what_makes_a_model_the_same() -> None:
    assert model_identity(CARD) == model_identity(replace(CARD, created=9, source="elsewhere"))
    assert model_identity(CARD) != model_identity(OTHER)


async def test_workers_that_name_blocks_otherwise_are_told_of(frontend: Frontend) -> None:
    await frontend.announce("a", CARD)
    await until(lambda: frontend.opened)
    await frontend.settle()
    await frontend.announce("b", replace(CARD, block_tokens=32))
    await until(frontend.catalogue.incompatible_workers)
    assert frontend.catalogue.incompatible_workers() == {
        "b": "org/tiny: block tokens 32 instead of 16"
    }
    await frontend.announce("b", None)
    await until(lambda: not frontend.catalogue.incompatible_workers())


async def test_an_unreadable_card_hides_no_other(frontend: Frontend) -> None:
    for instance, card in (("a", b"{"), ("b", b'{"names": ["\xff"]}')):
        await frontend.runtime.discovery.put(f"/dynamo/models/org%2Ftiny/{instance}", card)
    await frontend.settle()
    await frontend.announce("c", CARD)
    await until(lambda: frontend.opened)
    assert frontend.opened == [CARD]
