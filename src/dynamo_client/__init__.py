"""A client of Dynamo's HTTP API and of other servers with OpenAI's API, independent of `dynamo`."""

from dynamo_client.client import DynamoClient
from dynamo_client.config import DynamoConfig
from dynamo_client.errors import (
    DynamoAPIError,
    DynamoCertificateError,
    DynamoConnectionError,
    DynamoError,
    DynamoTimeoutError,
)
from dynamo_client.streams import ChunkStream, SyncChunkStream
from dynamo_client.sync import SyncDynamoClient

__all__ = [
    "ChunkStream",
    "DynamoAPIError",
    "DynamoCertificateError",
    "DynamoClient",
    "DynamoConfig",
    "DynamoConnectionError",
    "DynamoError",
    "DynamoTimeoutError",
    "SyncChunkStream",
    "SyncDynamoClient",
]
