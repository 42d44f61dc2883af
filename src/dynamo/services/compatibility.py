"""The check that workers of a model hash its KV blocks like the model's card."""

from __future__ import annotations

import logging

import msgspec

from dynamo.models.card import BlockIdentity, ModelCard, block_identity
from dynamo.runtime.calls.instances import Instance

log = logging.getLogger(__name__)

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
