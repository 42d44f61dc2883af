"""Ranks of one worker that step together, as engines do whose ranks share experts."""

from __future__ import annotations

from typing import Any

from dynamo.operations.replay.fast.step_time import Leap
from dynamo.operations.replay.fast.worker import FastWorker


class LockstepRank(FastWorker):
    """A rank whose steps begin and end with those of all ranks of its worker, `peers`, itself among
    them. Each step takes the time of the slowest one. `idle`: the workers that may begin a step."""

    def __init__(self, peers: list[FastWorker], idle: list[FastWorker], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._peers, self._idle = peers, idle
        peers.append(self)

    def begin(self, now: float) -> None:
        peers = self._peers
        if any(peer.is_busy for peer in peers):
            return  # the next step begins when all have ended this one
        for peer in peers:
            FastWorker.begin(peer, now)
        busy = [peer for peer in peers if peer.is_busy]
        leaps = [peer.leap for peer in busy if peer.leap is not None]
        if not busy:
            return
        if len(leaps) == len(busy):
            steps = min(peer.leap_steps for peer in busy)
            leap = max(leaps, key=lambda leap: leap.duration_s(steps))
        else:
            steps, step_s = 1, max(peer.next_step_s for peer in busy)
            leap = Leap(step_s, 0.0, 0.0)
        for peer in busy:
            peer.align(leap, steps, now)

    def on_wake(self, now: float) -> None:
        super().on_wake(now)
        self._idle += [peer for peer in self._peers if peer.load and not peer.is_busy]

    def end_leap(self, now: float) -> None:
        for peer in self._peers:
            FastWorker.end_leap(peer, now)
