"""`dynamo run in=text`: a prompt on a terminal; without one, standard input is one message."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncGenerator

from dynamo.cli.fetch import fetch
from dynamo.core.settings import Settings

PROMPT = "> "
READ_BYTES = 64 << 10


def start(settings: Settings) -> int:
    """Fetch the model, then talk until the end of input or Ctrl-C."""
    from dynamo.services.conversation import converse
    from dynamo.telemetry.logs import configure

    configure(settings.logging.level, settings.logging.format, "supervisor")
    names = fetch(settings)

    if not sys.stdin.isatty():
        return asyncio.run(converse(settings, _whole_input, _write))
    print(f"{names[0]}: one line is one message; Ctrl-D ends.", file=sys.stderr)
    return asyncio.run(converse(settings, _typed_lines, _write))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


async def _whole_input() -> AsyncGenerator[str, None]:
    whole = b"".join([part async for part in _input()])
    if message := whole.decode(errors="replace").strip():
        yield message


async def _typed_lines() -> AsyncGenerator[str, None]:
    _write(PROMPT)
    async for raw in _input():  # a terminal gives a line a read
        if line := raw.decode(errors="replace").strip():
            yield line
        _write(PROMPT)


async def _input() -> AsyncGenerator[bytes, None]:
    """Standard input as it comes. It is read on a daemon thread: a read that never returns must
    not hold up the end of the process."""
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
