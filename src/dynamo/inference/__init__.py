"""Workers, engines and KV memory."""

from dynamo.inference.kv_publisher import KVPublisher

__all__ = ["KVPublisher"]
