"""`dynamo run in=text`: a prompt on a terminal, else standard input as a single message."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import dynamo_client
from dynamo.cli.inputs.temporary import run_in_deployment
from dynamo.cli.parsing import served_model_names
from dynamo.cli.progress_bar import ProgressBar
from dynamo.core.errors import DynamoError
from dynamo.core.settings import Settings
from dynamo_client import DynamoClient, DynamoConfig

PROMPT = "> "
READ_BYTES = 64 << 10


def run_text(settings: Settings) -> int:
    """Chat until the end of input or Ctrl-C. Raises the error of an answer."""
    if sys.stdin.isatty():
        name = served_model_names(settings)[0]
        print(f"{name}: each line is a message; Ctrl-D ends.", file=sys.stderr)
    return run_in_deployment(settings, "text", _converse)


async def _converse(_: ProgressBar, config: DynamoConfig) -> int:
    """Answer every message, with the conversation before it."""
    messages = _read_typed_messages() if sys.stdin.isatty() else _read_single_message()
    history: list[dict[str, str]] = []
    async with DynamoClient(config) as client, aclosing(messages):
        async for message in messages:
            history.append({"role": "user", "content": message})
            answer = await _write_answer(client, history)
            history.append({"role": "assistant", "content": answer})
    return 0


async def _write_answer(client: DynamoClient, history: Sequence[dict[str, str]]) -> str:
    """Write an answer as it arrives, after its reasoning, and return it without that."""
    parts: list[str] = []
    reasoned = False
    try:
        async with await client.chat_completion(history, stream=True) as chunks:
            async for chunk in chunks:
                for choice in chunk["choices"]:
                    if reasoning := choice["delta"].get("reasoning_content"):
                        _write(reasoning)
                        reasoned = True
                    if text := choice["delta"].get("content"):
                        _write(f"\n\n{text}" if reasoned else text)
                        parts.append(text)
                        reasoned = False
    except dynamo_client.DynamoError as error:
        raise DynamoError(error.message, hint=error.hint) from error
    finally:
        _write("\n")
    return "".join(parts)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


async def _read_single_message() -> AsyncGenerator[str, None]:
    whole = b"".join([part async for part in _read_stdin()])
    if message := whole.decode(errors="replace").strip():
        yield message


async def _read_typed_messages() -> AsyncGenerator[str, None]:
    _write(PROMPT)
    async for raw in _read_stdin():  # a terminal gives a line a read
        if line := raw.decode(errors="replace").strip():
            yield line
        _write(PROMPT)


async def _read_stdin() -> AsyncGenerator[bytes, None]:
    """Yield the bytes of standard input as they arrive. A daemon thread reads them, since a blocked
    read must not delay the end of the process."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[bytes] = asyncio.Queue()

    def read() -> None:
        while True:
            part = os.read(sys.stdin.fileno(), READ_BYTES)
            loop.call_soon_threadsafe(arrived.put_nowait, part)
            if not part:
                return

    threading.Thread(target=read, name="stdin", daemon=True).start()
    while part := await arrived.get():
        yield part
