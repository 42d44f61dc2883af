"""The KV index: which worker holds which blocks."""

from dynamo.scheduling.index.cache_view import CacheView, CacheViewMode
from dynamo.scheduling.index.kv_index import KvIndex

__all__ = ["CacheView", "CacheViewMode", "KvIndex"]
