"""What happens second by second, kept and told while a measurement runs."""

from __future__ import annotations

from collections.abc import Callable

from dynamo.core.clock import Clock
from dynamo.operations.bench.measure import LoadGenerator

PROGRESS_INTERVAL_S = 0.25
TICKS_PER_SECOND = 4


class ThroughputTimeline:
    """Events with text of requests that ended, by second."""

    def __init__(
        self,
        measurement: LoadGenerator,
        on_progress: Callable[[LoadGenerator, float], None] | None,
        clock: Clock,
    ) -> None:
        self._generator = measurement
        self._on_progress = on_progress
        self._clock = clock
        self.per_second: list[int] = []

    async def run(self) -> None:
        """Until cancelled."""
        began = self._clock.now()
        before = ticks = 0
        while True:
            ticks += 1
            await self._clock.sleep_until(began + ticks * PROGRESS_INTERVAL_S)
            if self._on_progress is not None:
                self._on_progress(self._generator, ticks * PROGRESS_INTERVAL_S)
            if ticks % TICKS_PER_SECOND == 0:
                texts = self._generator.text_events
                self.per_second.append(texts - before)
                before = texts
