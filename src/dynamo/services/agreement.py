"""Workers of a model that cannot be routed to, because they name its KV blocks in another way."""

from __future__ import annotations

import logging

import msgspec

from dynamo.models.card import BlockIdentity, ModelCard, block_identity
from dynamo.runtime.instances import Instance

log = logging.getLogger(__name__)

BLOCKS = "blocks"


class Agreement:
    """`serves` is a `Where`: instances of the card's model that agree with the card. One that does
    not is refused, with an error in the log each time it is announced."""

    def __init__(self, card: ModelCard) -> None:
        self._name = card.name
        self._card = block_identity(card)

    def serves(self, instance: Instance) -> bool:
        """Whether requests of this model may go to the instance."""
        if instance.capabilities.get("model") != self._name:
            return False
        different = self._differences(instance)
        if different:
            fields = {"worker": instance.id, "model": self._name, "different": different}
            log.error(
                "worker refused: it does not agree with the model's card", extra={"fields": fields}
            )
        return not different

    def _differences(self, instance: Instance) -> str:
        try:
            told = msgspec.convert(instance.capabilities.get(BLOCKS, {}), BlockIdentity)
        except msgspec.ValidationError as error:
            return f"unreadable: {error}"
        return self._card.differences(told)
