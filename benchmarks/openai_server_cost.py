"""CPU of a worker in front of another server (out=openai) per streamed token.

    .venv/bin/python benchmarks/openai_server_cost.py [--text] [--streams 16] [--tokens 400]

A process of its own plays vLLM: one event with a token id for every stream and step (`--step-ms`).
With `--text`, chat goes there as chat. Counted is the CPU of this process, which has the engine and
encodes its replies as a worker does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from functools import partial
from typing import Any

import uvloop
from msgspec.structs import replace

from dynamo.communication.http.client import HttpClient
from dynamo.core.clock import SystemClock
from dynamo.core.codec import ReplyEncoder, pack_ids
from dynamo.core.context import Context
from dynamo.core.tasks import run_all
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions, TextParameters
from dynamo.inference.openai_server.engine import OpenAIServerEngine
from dynamo.models.resolve import resolve_model_blocking
from dynamo.models.tokenization.tokenizer import load_tokenizer

EVENT = {
    "id": "cmpl-8d2a1b3c4d5e6f708192a3b4c5d6e7f8",
    "object": "text_completion",
    "created": 1795400638,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "text": " token",
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
            "token_ids": [1234],
        }
    ],
}
CHAT_EVENT = EVENT | {
    "object": "chat.completion.chunk",
    "choices": [
        {
            "index": 0,
            "delta": {"content": " token", "reasoning_content": None},
            "logprobs": None,
            "finish_reason": None,
            "token_ids": None,
        }
    ],
}


def play_vllm(
    port: multiprocessing.Queue[int], tokens: int, step_s: float, event: dict[str, Any]
) -> None:
    """Serve until the process is ended."""
    model = {"id": "m", "root": "m", "owned_by": "vllm", "max_model_len": 8192}
    models = json.dumps({"data": [model]}).encode()
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    part = b"%x\r\n%s\r\n" % (len(data), data)
    last = json.loads(json.dumps(event))
    last["choices"][0] |= {"finish_reason": "length", "text": "", "delta": {}, "token_ids": []}
    tail = b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n"
    tail = b"%x\r\n%s\r\n0\r\n\r\n" % (len(tail), tail)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            length = 0
            while (header := await reader.readline()) not in {b"\r\n", b""}:
                if header.lower().startswith(b"content-length:"):
                    length = int(header.split(b":")[1])
            await reader.readexactly(length)
            if b"completions" not in line:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(models))
                writer.write(models)
                continue
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for step in range(tokens):
                writer.write(part)
                now = time.monotonic()
                await asyncio.sleep(step_s - now % step_s if step else 0)
            writer.write(tail)
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


async def measure(port: int, streams: int, tokens: int, *, text: bool) -> None:
    files = resolve_model_blocking("")
    http = HttpClient(f"http://127.0.0.1:{port}", {}, None)
    tokenizer = None if text else partial(load_tokenizer, files.tokenizer)
    engine = OpenAIServerEngine(http, tokenizer, SystemClock())
    await engine.start()
    stops = StopConditions(max_tokens=tokens, ignore_eos=True)
    request = GenerateRequest(
        "r", "m", pack_ids(range(300, 600)), SamplingParams(temperature=0), stops
    )
    if text:
        prompt = b'{"messages": [{"role": "user", "content": "hi"}]}'
        values = {"max_tokens": tokens}
        request = replace(request, token_ids=prompt, text=TextParameters(chat=True, values=values))
    payloads = 0

    def send(payload: bytes) -> bool:
        nonlocal payloads
        payloads += len(payload) > 0
        return True

    async def round_of_streams() -> None:
        calls = (engine.generate(request, Context("r"), ReplyEncoder(send)) for _ in range(streams))
        await run_all(*calls)

    await round_of_streams()
    for _ in range(3):
        payloads = 0
        started, cpu = time.perf_counter(), time.process_time()
        await round_of_streams()
        cpu = time.process_time() - cpu
        seconds = time.perf_counter() - started
        count = streams * tokens
        print(f"{cpu / count * 1e6:.1f} us of CPU a token ({count} tokens in {seconds:.1f} s)")
    await engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", action="store_true", help="without the model's tokenizer")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=10.0)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    port: multiprocessing.Queue[int] = context.Queue()
    server = context.Process(
        target=play_vllm,
        args=(port, args.tokens, args.step_ms / 1000, CHAT_EVENT if args.text else EVENT),
        daemon=True,
    )
    server.start()
    try:
        uvloop.run(measure(port.get(timeout=60), args.streams, args.tokens, text=args.text))
    finally:
        server.terminate()


if __name__ == "__main__":
    main()
