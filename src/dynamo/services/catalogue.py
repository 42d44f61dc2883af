"""The catalogue of models: follows the cards that workers announce and opens each model."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Generic, TypeVar
from urllib.parse import unquote

import msgspec

from dynamo.communication.directory import RecordChange, follow_records
from dynamo.core.clock import Backoff
from dynamo.core.errors import DECODE_ERRORS, DynamoError
from dynamo.models.card import BlockIdentity, ModelCard, block_identity
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.services.desired_models import DesiredModels

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_S = 1.0
MAX_RETRY_S = 15.0

OpenModel = Callable[[ModelCard], Awaitable[None]]
"""Opens the model of a card. Replaces the open model of that name. Raises `DynamoError`."""
CloseModel = Callable[[str], None]
"""Begins to close the open model of this id."""
ReportNotOpen = Callable[[str, str], None]
"""(model, reason): the model cannot be opened yet."""


def models_prefix(namespace: str) -> str:
    """Return the key prefix of cards; a worker's card has the key `{prefix}{model}/{instance}`."""
    return f"/{namespace}/models/"


def model_identity(card: ModelCard) -> ModelCard:
    """Return the card without the fields in which workers of one model may differ."""
    tokenizer = card.tokenizer and msgspec.structs.replace(card.tokenizer, path="")
    return msgspec.structs.replace(card, tokenizer=tokenizer, engine=None, created=0, source="")


def majority_card(cards: Collection[ModelCard], opened: ModelCard | None = None) -> ModelCard:
    """Return the card that most workers announce, so that one different worker replaces no model.

    Among equals, the `opened` identity wins, then the newest card.
    """
    groups: defaultdict[bytes, list[ModelCard]] = defaultdict(list)
    for card in cards:
        groups[msgspec.json.encode(model_identity(card))].append(card)

    def rank(group: list[ModelCard]) -> tuple[int, bool, int]:
        created = max(card.created for card in group)
        return len(group), model_identity(group[0]) == opened, created

    majority = max(groups.values(), key=rank)
    return max(majority, key=lambda card: card.created)


class ModelRecords(Generic[T]):
    """Follows discovery records `{prefix}{model}/{instance}`; `by_model` holds them decoded."""

    def __init__(
        self, runtime: DistributedRuntime, prefix: str, decode: Callable[[bytes], T]
    ) -> None:
        self._runtime = runtime
        self._prefix = prefix
        self._decode = decode
        self.by_model: defaultdict[str, dict[str, T]] = defaultdict(dict)

    async def follow(self, on_change: Callable[[str], Awaitable[None] | None]) -> None:
        """Call `on_change(model)` after changes until cancelled; restart a watch that fails."""

        async def apply(batch: Sequence[RecordChange], replaces: bool) -> None:
            if replaces:
                self.by_model.clear()
            for model in self._apply_changes(batch):
                if (change := on_change(model)) is not None:
                    await change

        await follow_records(self._runtime.discovery, self._prefix, apply, self._runtime.clock)

    def _apply_changes(self, batch: Sequence[RecordChange]) -> set[str]:
        changed = set()
        for change in batch:
            quoted, _, instance = change.key.removeprefix(self._prefix).rpartition("/")
            records = self.by_model[unquote(quoted)]
            records.pop(instance, None)
            changed.add(unquote(quoted))
            try:
                if change.value is not None:
                    records[instance] = self._decode(change.value)
            except DECODE_ERRORS as error:
                fields = {"key": change.key, "error": str(error)}
                log.warning("invalid record of a model", extra={"fields": fields})
        return changed


class ModelOpener(Generic[T]):
    """Opens models one at a time by name, and tries again after a `DynamoError`.

    `find_card` returns the card to open, or None if the model is open as it should be.
    """

    def __init__(
        self,
        runtime: DistributedRuntime,
        find_card: Callable[[str], T | None],
        open_card: Callable[[T], Awaitable[None]],
        on_not_open: ReportNotOpen,
    ) -> None:
        self._runtime = runtime
        self._find_card = find_card
        self._open_card = open_card
        self._report_not_open = on_not_open
        self._opening: set[str] = set()

    def open_if_changed(self, name: str) -> None:
        """Start to open the model if it is to be opened and is not being opened."""
        if name not in self._opening and self._find_card(name) is not None:
            self._opening.add(name)
            self._runtime.tasks.start(self._open_with_retries(name), f"open {name}")

    async def _open_with_retries(self, name: str) -> None:
        backoff = Backoff(RETRY_S, MAX_RETRY_S)
        try:
            while (card := self._find_card(name)) is not None:
                try:
                    await self._open_card(card)
                except DynamoError as error:
                    self._report_not_open(name, error.message)
                    fields = {"model": name, "error": error.message}
                    log.warning("a model cannot be opened yet", extra={"fields": fields})
                    await self._runtime.clock.sleep(backoff.next_s())
        finally:
            self._opening.discard(name)


class Catalogue:
    """Opens a model when its first worker announces it, and again when most announce another card.

    A model stays open while its workers are away, and is closed when it was removed.
    """

    def __init__(
        self,
        runtime: DistributedRuntime,
        desired: DesiredModels,
        open_model: OpenModel,
        close_model: CloseModel,
        on_not_open: ReportNotOpen,
    ) -> None:
        self._runtime = runtime
        self._desired = desired
        self._open_model = open_model
        self._close_model = close_model
        self._report_not_open = on_not_open
        prefix = models_prefix(runtime.settings.runtime.namespace)
        self._cards = ModelRecords(runtime, prefix, msgspec.json.Decoder(ModelCard).decode)
        self._opened_cards: dict[str, ModelCard] = {}

    def incompatible_workers(self) -> dict[str, str]:
        """Return by instance how a worker's card differs from the card that was opened."""
        incompatible = {}
        for name, opened in self._opened_cards.items():
            for instance, card in self._cards.by_model[name].items():
                differences = block_identity(opened).describe_differences(block_identity(card))
                if differences:
                    incompatible[instance] = f"{name}: {differences}"
        return incompatible

    async def run(self) -> None:
        """Follow the cards until cancelled."""
        opener = ModelOpener(self._runtime, self._card_to_open, self._open, self._report_not_open)

        def on_desired_change() -> None:
            for name in [name for name in self._opened_cards if name in self._desired.removed]:
                self._close(name)
            for name in self._desired.aliases:  # a removed model may be back
                opener.open_if_changed(name)

        def on_cards_changed(name: str) -> None:
            if not self._cards.by_model[name]:
                self._desired.forget(name)
            opener.open_if_changed(name)

        self._desired.on_change(on_desired_change)
        await self._cards.follow(on_cards_changed)

    def _card_to_open(self, name: str) -> ModelCard | None:
        if name in self._desired.removed:
            return None
        cards, opened = self._cards.by_model[name].values(), self._opened_cards.get(name)
        card = majority_card(cards, opened) if cards else None
        return None if card is None or model_identity(card) == opened else card

    async def _open(self, card: ModelCard) -> None:
        await self._open_model(card)
        self._opened_cards[card.name] = model_identity(card)
        if card.name in self._desired.removed:
            self._close(card.name)

    def _close(self, name: str) -> None:
        del self._opened_cards[name]
        self._close_model(name)


BLOCK_IDENTITY_CAPABILITY = "blocks"


class CardCompatibility:
    """Accepts the instances of the card's model whose block identity equals the card's.

    Other instances are refused, with an error in the log each time they are announced.
    """

    def __init__(self, card: ModelCard) -> None:
        self._model_name = card.name
        self._block_identity = block_identity(card)

    def accepts(self, instance: Instance) -> bool:
        """Return whether requests of this model may be sent to the instance."""
        if instance.capabilities.get("model") != self._model_name:
            return False
        differences = self._differences(instance)
        if differences:
            fields = {"worker": instance.id, "model": self._model_name, "differences": differences}
            log.error("worker refused: differs from the model's card", extra={"fields": fields})
        return not differences

    def _differences(self, instance: Instance) -> str:
        try:
            capability = instance.capabilities.get(BLOCK_IDENTITY_CAPABILITY, {})
            announced = msgspec.convert(capability, BlockIdentity)
        except msgspec.ValidationError as error:
            return f"unreadable: {error}"
        return self._block_identity.describe_differences(announced)
