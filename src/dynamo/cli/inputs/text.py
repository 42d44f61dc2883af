"""`dynamo run in=text`: a prompt on a terminal, else standard input as a single message."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncGenerator

from dynamo.cli.parsing import served_model_names
from dynamo.cli.progress_bar import ProgressBar
from dynamo.core.plugins import engine_needs_weights
from dynamo.core.settings import Settings
from dynamo.core.settings.server_url import lacks_tokenizer

PROMPT = "> "
READ_BYTES = 64 << 10


def run_text(settings: Settings) -> int:
    """Fetch the model, then chat until the end of input or Ctrl-C."""
    from dynamo.models.resolve import resolve_model_blocking
    from dynamo.services.deployment.conversation import converse
    from dynamo.telemetry.logs import configure_logging

    configure_logging(settings.logging.level, settings.logging.format, "supervisor")
    if not lacks_tokenizer(settings):
        with_weights = engine_needs_weights(settings.engine.kind)
        with ProgressBar(sys.stderr) as bar:
            resolve_model_blocking(settings.model.path, bar, with_weights=with_weights)
    names = served_model_names(settings)

    if not sys.stdin.isatty():
        return asyncio.run(converse(settings, _read_single_message, _write))
    print(f"{names[0]}: each line is a message; Ctrl-D ends.", file=sys.stderr)
    return asyncio.run(converse(settings, _read_typed_messages, _write))


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
