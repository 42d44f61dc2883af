"""From conversations and texts to tokens, and back."""

from dynamo.scheduling.processor.processor import ChatProcessor

__all__ = ["ChatProcessor"]
