"""Constants of NVIDIA Dynamo's backends."""

from __future__ import annotations

from enum import Enum


class DisaggregationMode(Enum):
    """The part of an answer that a worker computes."""

    AGGREGATED = "agg"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"
