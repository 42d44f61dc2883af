"""User services: classes with endpoints that call each other and run in separate processes."""

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
