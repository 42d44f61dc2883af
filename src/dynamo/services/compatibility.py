"""Workers of a model that cannot be routed to, because they name its KV blocks in another way."""

from __future__ import annotations

import logging

import msgspec

from dynamo.models.card import BlockIdentity, ModelCard, block_identity
from dynamo.runtime.calls.instances import Instance

log = logging.getLogger(__name__)

BLOCK_IDENTITY_CAPABILITY = "blocks"


class CardCompatibility:
    """`serves` is a `Where`: instances of the card's model that agree with the card. One that does
    not is refused, with an error in the log each time it is announced."""

    def __init__(self, card: ModelCard) -> None:
        self._model_name = card.name
        self._block_identity = block_identity(card)

    def accepts(self, instance: Instance) -> bool:
        """Whether requests of this model may go to the instance."""
        if instance.capabilities.get("model") != self._model_name:
            return False
        different = self._differences(instance)
        if different:
            fields = {"worker": instance.id, "model": self._model_name, "different": different}
            log.error(
                "worker refused: it does not agree with the model's card", extra={"fields": fields}
            )
        return not different

    def _differences(self, instance: Instance) -> str:
        try:
            told = msgspec.convert(
                instance.capabilities.get(BLOCK_IDENTITY_CAPABILITY, {}), BlockIdentity
            )
        except msgspec.ValidationError as error:
            return f"unreadable: {error}"
        return self._block_identity.describe_differences(told)
