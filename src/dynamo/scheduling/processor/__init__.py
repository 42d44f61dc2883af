"""The processor: conversations and texts to token ids, and back."""

from dynamo.scheduling.processor.chat_processor import ChatProcessor

__all__ = ["ChatProcessor"]
