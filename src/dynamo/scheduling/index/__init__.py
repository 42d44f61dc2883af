"""Which worker holds which KV blocks: what a router asks before it chooses."""

from dynamo.scheduling.index.cache_view import CacheView, CacheViewMode
from dynamo.scheduling.index.kv_index import KvIndex

__all__ = ["CacheView", "CacheViewMode", "KvIndex"]
