"""Services of your own: classes with endpoints, which depend on each other and run anywhere."""

from dynamo.sdk.decorators import depends, dynamo_endpoint, on_start, on_stop, service
from dynamo.sdk.graph import walk
from dynamo.sdk.request_context import request_id, time_left

__all__ = [
    "depends",
    "dynamo_endpoint",
    "on_start",
    "on_stop",
    "request_id",
    "service",
    "time_left",
    "walk",
]
