"""The calls of sdk_hop.py through grpc.aio: the same bytes, generic handlers, no protobuf."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import msgspec

encode = msgspec.msgpack.encode
decode = msgspec.msgpack.decode
PORT_FILE = "grpc-port"


async def serve(place: str, body: dict[str, Any]) -> None:
    """Serve until standard input ends."""

    async def echo(request: dict[str, Any], _: Any) -> dict[str, Any]:
        return request

    async def items(request: dict[str, Any], _: Any) -> AsyncIterator[dict[str, Any]]:
        for _number in range(request["count"]):
            yield body

    async def cpu(_request: Any, _: Any) -> float:
        return time.process_time()

    codec = {"request_deserializer": decode, "response_serializer": encode}
    handlers = {
        "echo": grpc.unary_unary_rpc_method_handler(echo, **codec),
        "items": grpc.unary_stream_rpc_method_handler(items, **codec),
        "cpu": grpc.unary_unary_rpc_method_handler(cpu, **codec),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Hop", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await asyncio.to_thread((Path(place) / PORT_FILE).write_text, str(port))
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


async def with_calls(
    place: str, body: dict[str, Any], measure: Callable[..., Awaitable[tuple[float, float]]]
) -> tuple[float, float]:
    """Call `measure(cpu, once, stream)` with calls to the server at `place`."""
    file = Path(place) / PORT_FILE
    while not await asyncio.to_thread(lambda: file.exists() and file.read_text()):
        await asyncio.sleep(0.05)
    codec = {"request_serializer": encode, "response_deserializer": decode}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{file.read_text()}") as channel:
        echo = channel.unary_unary("/Hop/echo", **codec)
        cpu = channel.unary_unary("/Hop/cpu", **codec)
        items = channel.unary_stream("/Hop/items", **codec)
        return await measure(lambda: cpu(None), lambda: echo(body), lambda n: items({"count": n}))
