"""From conversations and texts to tokens, and back."""

from dynamo.scheduling.processor.processor import Processor

__all__ = ["Processor"]
