"""Views of the prefix caches of foreign engines, built from the events of these engines."""

from dynamo.inference.external.drift_check import DriftCheck, Prediction
from dynamo.inference.external.engine_blocks import EngineBlocks
from dynamo.inference.external.engine_events import PolledEventReader, decode_batch
from dynamo.inference.external.event_reader import (
    KvEventEndpoint,
    KvEventReader,
    find_loopback_ports,
)
from dynamo.inference.external.kv_view import EngineKvView, ViewedRank

__all__ = [
    "DriftCheck",
    "EngineBlocks",
    "EngineKvView",
    "KvEventEndpoint",
    "KvEventReader",
    "PolledEventReader",
    "Prediction",
    "ViewedRank",
    "decode_batch",
    "find_loopback_ports",
]
