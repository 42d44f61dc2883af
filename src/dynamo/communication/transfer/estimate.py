"""Learnt speed of a peer or a tier, and the breaker that spares a failing one."""

from __future__ import annotations

from math import inf
from typing import Final

from dynamo.core.clock import Backoff

SMALL_PULL_BYTES: Final = 64 << 10
"""Pulls up to this size measure the latency, larger ones the bandwidth."""
LEARNING_RATE: Final = 0.25
FULL_SAMPLE_BYTES: Final = 4 << 20
"""A sample of this size counts fully, a smaller one in proportion."""

INITIAL_FORGET_S: Final = 60.0
MAX_FORGET_S: Final = 3600.0
SLOW_S: Final = 1.0
SLOW_FACTOR: Final = 2.0
"""A load that failed teaches the speed if it took so long, and longer than predicted."""

FAILURE_THRESHOLD: Final = 3
INITIAL_OPEN_S: Final = 1.0
MAX_OPEN_S: Final = 30.0


class TransferEstimate:
    """Latency and bandwidth of a peer, learnt from its pulls, and the bytes in front of a new one.

    While several pulls overlap, their bytes are counted against the time in which any was running.
    """

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.pending_bytes = 0
        self._pulls = 0
        self._done_bytes = 0
        self._since_s = 0.0

    def start(self, size_bytes: int, now: float) -> None:
        """Count a pull that starts."""
        if not self._pulls:
            self._since_s, self._done_bytes = now, 0
        self._pulls += 1
        self.pending_bytes += size_bytes

    def finish(self, size_bytes: int, now: float, *, completed: bool) -> None:
        """Count the end of a pull. A failed one teaches nothing."""
        self._pulls -= 1
        self.pending_bytes -= size_bytes
        if not completed:
            self._since_s, self._done_bytes = now, 0
            return
        self._done_bytes += size_bytes
        elapsed_s = now - self._since_s
        if self._done_bytes <= SMALL_PULL_BYTES:
            if not self._pulls:
                self.latency_s += LEARNING_RATE * (elapsed_s - self.latency_s)
            return
        moving_s = max(elapsed_s - self.latency_s, 0.1 * elapsed_s, 1e-6)
        weight = LEARNING_RATE * min(1.0, self._done_bytes / FULL_SAMPLE_BYTES)
        self.bytes_per_s += weight * (self._done_bytes / moving_s - self.bytes_per_s)
        self._since_s, self._done_bytes = now, 0

    def predict_s(self, size_bytes: int) -> float:
        """Predict the seconds of a pull that starts now."""
        return self.latency_s + (self.pending_bytes + size_bytes) / self.bytes_per_s


class LoadEstimate(TransferEstimate):
    """Learns the speed of a tier from its loads. The first one replaces the guess, which later ones
    would only correct by a quarter each: a slow tier would delay ten requests.

    A tier that seems slower than computing is not used, and so teaches nothing more. After a time
    without loads, which doubles each time up to `MAX_FORGET_S`, the guess counts again."""

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        super().__init__(latency_s, bytes_per_s)
        self._guess = latency_s, bytes_per_s
        self._is_guess = True
        self._ended_s = inf
        self._forget_s = INITIAL_FORGET_S

    def forget_old(self, now: float) -> None:
        """Return to the guess if that is quicker and no load has ended for long."""
        if self._pulls or now - self._ended_s < self._forget_s:
            return
        latency_s, bytes_per_s = self._guess
        self._is_guess = self._is_guess or bytes_per_s > self.bytes_per_s
        self.latency_s = min(self.latency_s, latency_s)
        self.bytes_per_s = max(self.bytes_per_s, bytes_per_s)
        self._ended_s = inf
        self._forget_s = min(2 * self._forget_s, MAX_FORGET_S)

    def finish_load(self, size_bytes: int, loaded_bytes: int, started_s: float, now: float) -> None:
        """Count the end of a load. A slow one teaches the speed also if it failed, and one that
        brought nothing need not be slower than predicted."""
        predicted_s = self.latency_s + size_bytes / self.bytes_per_s if loaded_bytes else 0.0
        self.finish(size_bytes, now, completed=loaded_bytes == size_bytes)
        elapsed_s = now - started_s
        if loaded_bytes < size_bytes and elapsed_s > max(SLOW_S, SLOW_FACTOR * predicted_s):
            self.bytes_per_s = max(1, loaded_bytes) / elapsed_s
            self._is_guess = False
        if self._ended_s != inf:
            self._forget_s = INITIAL_FORGET_S
        self._ended_s = now

    def finish(self, size_bytes: int, now: float, *, completed: bool) -> None:
        started_s = self._since_s
        super().finish(size_bytes, now, completed=completed)
        if self._is_guess and completed and size_bytes > SMALL_PULL_BYTES:
            self.bytes_per_s = size_bytes / max(now - started_s, 1e-6)
            self._is_guess = False


class PeerBreaker:
    """Stops pulls from a peer for a while after repeated failures.

    `FAILURE_THRESHOLD` failures in a row open the breaker. After `open_s` seconds it lets a single
    pull pass: a success closes it, a failure opens it for twice as long.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._last_failure_s = 0.0
        self._open_until_s = 0.0
        self._open_s = 0.0
        self._backoff = Backoff(INITIAL_OPEN_S, MAX_OPEN_S)
        self._trial_running = False

    def is_open(self, now: float) -> bool:
        """Whether a pull that starts now would be refused."""
        return bool(self._open_s) and (self._trial_running or now < self._open_until_s)

    def start(self, now: float) -> bool:
        """Register a pull. False: the peer must not be asked now."""
        if not self._open_s:
            return True
        if self.is_open(now):
            return False
        self._trial_running = True
        return True

    def on_success(self) -> None:
        """Close the breaker after a pull that the peer answered."""
        self._failures, self._open_s, self._trial_running = 0, 0.0, False
        self._backoff.reset()

    def on_failure(self, started_s: float, now: float) -> None:
        """Count a failed pull. Pulls that ran when another failed are part of that failure."""
        if not self._trial_running and self._failures and started_s < self._last_failure_s:
            return
        self._failures += 1
        self._last_failure_s = now
        if self._trial_running or self._failures >= FAILURE_THRESHOLD:
            self._open_s = self._backoff.next_s()
            self._open_until_s = now + self._open_s
            self._trial_running = False

    def on_cancelled(self) -> None:
        """Let another pull be the trial, because this one proved nothing."""
        self._trial_running = False
