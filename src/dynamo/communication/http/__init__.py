"""A thin HTTP/1.1 server on httptools and uvloop, with one task per request."""

from dynamo.communication.http.body_budget import LARGE_BODY_BYTES, BodyHold
from dynamo.communication.http.descriptors import (
    RESERVED_FROM_STATUS,
    count_open_descriptors,
    raise_open_file_limit,
)
from dynamo.communication.http.errors import HeadersTooLarge, PortInUse
from dynamo.communication.http.limits import HttpLimits
from dynamo.communication.http.request import HeaderCheck, Request
from dynamo.communication.http.response import Response
from dynamo.communication.http.server import ErrorHandler, HttpHandler, HttpServer
from dynamo.communication.http.web_access import WebAccess

__all__ = [
    "LARGE_BODY_BYTES",
    "BodyHold",
    "ErrorHandler",
    "HeaderCheck",
    "HeadersTooLarge",
    "HttpHandler",
    "HttpLimits",
    "HttpServer",
    "PortInUse",
    "RESERVED_FROM_STATUS",
    "Request",
    "Response",
    "WebAccess",
    "count_open_descriptors",
    "raise_open_file_limit",
]
