"""A client of Dynamo's HTTP API, and of others that speak OpenAI's. Independent of `dynamo`."""

from dynamo_client.client import DynamoClient
from dynamo_client.config import DynamoConfig
from dynamo_client.errors import (
    DynamoAPIError,
    DynamoCertificateError,
    DynamoConnectionError,
    DynamoError,
    DynamoTimeoutError,
)
from dynamo_client.streams import Stream, SyncStream
from dynamo_client.sync import SyncDynamoClient

__all__ = [
    "DynamoAPIError",
    "DynamoCertificateError",
    "DynamoClient",
    "DynamoConfig",
    "DynamoConnectionError",
    "DynamoError",
    "DynamoTimeoutError",
    "Stream",
    "SyncDynamoClient",
    "SyncStream",
]
