"""The processor: conversations and texts to token ids, and back."""

from dynamo.scheduling.processor.chat_processor import ChatProcessor
from dynamo.scheduling.processor.text_processor import TextProcessor

__all__ = ["ChatProcessor", "TextProcessor"]
