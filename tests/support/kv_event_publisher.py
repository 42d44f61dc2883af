"""A ZMQ publisher of KV events in its own thread, as engines have it."""

from __future__ import annotations

import threading
from collections import deque
from queue import Empty, Queue
from typing import Any

import zmq

END = (-1).to_bytes(8, "big", signed=True)


class KvEventPublisher:
    """Publishes payloads with rising numbers and repeats the last `buffer_steps` when asked.

    It binds where the address has a "*", else it connects. `with_topic`: the format of replays
    since vLLM 0.28. `count`: messages published so far.
    """

    def __init__(
        self,
        address: str,
        replay: str = "",
        buffer_steps: int = 10_000,
        with_topic: bool = True,
    ) -> None:
        self._address, self._replay_address = address, replay
        self._with_topic = with_topic
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._queue: Queue[tuple[str, Any]] = Queue()
        self.count = 0
        self._ready, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait()

    def publish(self, payload: bytes) -> None:
        """Publish the next message."""
        self.count += 1
        self._queue.put(("publish", payload))

    def lose(self, payload: bytes) -> None:
        """Number a message and keep it for replays, but do not publish it."""
        self._queue.put(("lose", payload))

    def send_raw(self, *frames: bytes) -> None:
        """Publish frames as they are."""
        self._queue.put(("raw", frames))

    def stop(self) -> None:
        """Close the sockets after what was published."""
        self._queue.put(("stop", b""))
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        context = zmq.Context()
        publishing = context.socket(zmq.XPUB)
        publishing.setsockopt(zmq.XPUB_VERBOSE, 1)
        bound = "*" in self._address
        (publishing.bind if bound else publishing.connect)(self._address)
        replaying = context.socket(zmq.ROUTER)
        if self._replay_address:
            replaying.bind(self._replay_address)
        self._ready.set()
        number = 0
        while not publishing.poll(10) and not self._stopping.is_set():
            pass  # until a reader has subscribed
        while True:
            if self._replay_address and replaying.poll(0):
                self._answer(replaying)
            try:
                kind, payload = self._queue.get(timeout=0.01)
            except Empty:
                continue
            if kind == "stop":
                break
            if kind == "raw":
                publishing.send_multipart(payload)
                continue
            if kind == "publish":
                publishing.send_multipart((b"kv", number.to_bytes(8, "big"), payload))
            self._buffer.append((number, payload))
            number += 1
        publishing.close(linger=100)
        replaying.close(linger=100)
        context.term()

    def _answer(self, replaying: Any) -> None:
        client, empty, first = replaying.recv_multipart()
        topic = (b"kv",) if self._with_topic else ()
        for number, payload in self._buffer:
            if number >= int.from_bytes(first, "big"):
                message = (*topic, number.to_bytes(8, "big"), payload)
                replaying.send_multipart((client, empty, *message))
        end = (b"",) if self._with_topic else ()
        replaying.send_multipart((client, empty, *end, END, b""))
