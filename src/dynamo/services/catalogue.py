"""The catalogue of models: follows the cards that workers announce and opens each model."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Generic, NamedTuple, TypeVar
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

    Among equals, the identity of the `opened` one wins, then the newest card.
    """
    groups: defaultdict[bytes, list[ModelCard]] = defaultdict(list)
    for card in cards:
        groups[msgspec.json.encode(model_identity(card))].append(card)
    identity = opened and model_identity(opened)

    def rank(group: list[ModelCard]) -> tuple[int, bool, int]:
        created = max(card.created for card in group)
        return len(group), model_identity(group[0]) == identity, created

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


class CardKind(NamedTuple, Generic[T]):
    """A kind of cards: `prefix(namespace)` of their keys, and `choose(cards, opened)`: the card to
    open, or None if the model is open as it should be."""

    prefix: Callable[[str], str]
    decode: Callable[[bytes], T]
    choose: Callable[[Collection[T], T | None], T | None]


def choose_card(cards: Collection[ModelCard], opened: ModelCard | None) -> ModelCard | None:
    """Return the majority card if it differs from the `opened` one."""
    card = majority_card(cards, opened)
    return None if opened and model_identity(card) == model_identity(opened) else card


MODELS = CardKind(models_prefix, msgspec.json.Decoder(ModelCard).decode, choose_card)


class Catalogue(Generic[T]):
    """Opens a model when its first worker announces it, and again when another card is chosen.

    Opens models one at a time by name, and tries again after a `DynamoError`. A model stays open
    while its workers are away, and is closed when it was removed. `cards`: of each model by worker;
    `opened`: by model.
    """

    def __init__(
        self,
        runtime: DistributedRuntime,
        desired: DesiredModels,
        kind: CardKind[T],
        open_model: Callable[[T], Awaitable[None]],
        close_model: CloseModel,
        on_not_open: ReportNotOpen,
    ) -> None:
        self._runtime = runtime
        self._desired = desired
        self._choose = kind.choose
        self._open_model = open_model
        self._close_model = close_model
        self._report_not_open = on_not_open
        prefix = kind.prefix(runtime.settings.runtime.namespace)
        self._records = ModelRecords(runtime, prefix, kind.decode)
        self.cards = self._records.by_model
        self.opened: dict[str, T] = {}
        self._opening: set[str] = set()

    async def run(self) -> None:
        """Follow the cards until cancelled."""
        self._desired.on_change(self._on_desired_change)
        await self._records.follow(self._on_cards_changed)

    def _on_desired_change(self) -> None:
        for name in self.opened.keys() & self._desired.removed:
            self._close(name)
        for name in self._desired.aliases:  # a removed model may be back
            self._open_if_changed(name)

    def _on_cards_changed(self, name: str) -> None:
        if not self.cards[name]:
            self._desired.forget(name)
        self._open_if_changed(name)

    def _card_to_open(self, name: str) -> T | None:
        cards = self.cards[name].values()
        if not cards or name in self._desired.removed:
            return None
        return self._choose(cards, self.opened.get(name))

    def _open_if_changed(self, name: str) -> None:
        if name not in self._opening and self._card_to_open(name) is not None:
            self._opening.add(name)
            self._runtime.tasks.start(self._open_with_retries(name), f"open {name}")

    async def _open_with_retries(self, name: str) -> None:
        backoff = Backoff(RETRY_S, MAX_RETRY_S)
        try:
            while (card := self._card_to_open(name)) is not None:
                try:
                    await self._open_model(card)
                except DynamoError as error:
                    self._report_not_open(name, error.message)
                    fields = {"model": name, "error": error.message}
                    log.warning("a model cannot be opened yet", extra={"fields": fields})
                    await self._runtime.clock.sleep(backoff.next_s())
                    continue
                self.opened[name] = card
                if name in self._desired.removed:
                    self._close(name)
        finally:
            self._opening.discard(name)

    def _close(self, name: str) -> None:
        del self.opened[name]
        self._close_model(name)


def incompatible_workers(catalogue: Catalogue[ModelCard]) -> dict[str, str]:
    """Return by instance how a worker's card differs from the card that was opened."""
    return {
        instance: f"{name}: {differences}"
        for name, opened in catalogue.opened.items()
        for instance, card in catalogue.cards[name].items()
        if (differences := block_identity(opened).describe_differences(block_identity(card)))
    }


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
