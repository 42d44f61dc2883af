"""From conversations and texts to tokens, and back."""

from dynamo.scheduling.processor.chat_processor import ChatProcessor

__all__ = ["ChatProcessor"]
