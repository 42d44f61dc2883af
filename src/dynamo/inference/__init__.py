"""Engines, their KV memory, and the workers that serve them."""

from dynamo.inference.kv_publisher import KVPublisher

__all__ = ["KVPublisher"]
