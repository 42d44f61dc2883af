"""An asyncio transport without a network."""

from __future__ import annotations

import asyncio
from typing import Any


class MemoryTransport(asyncio.Transport):
    """Keeps the bytes that its protocol writes in `written`. `ended`: connection_lost was called."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._protocol = protocol
        self._closing = False
        self.written = bytearray()
        self.ended = False
        protocol.connection_made(self)

    def receive(self, data: bytes) -> None:
        """Pass bytes of the peer to the protocol. An exception closes the connection."""
        if self._closing:
            return
        try:
            self._protocol.data_received(data)
        except Exception as error:
            self.close()
            context = {"message": "data_received failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, list_of_data: Any) -> None:
        for data in list_of_data:
            self.written += data

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self._lost)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._closing

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def _lost(self) -> None:
        self.ended = True
        self._protocol.connection_lost(None)
