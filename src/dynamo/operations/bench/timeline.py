"""What happens second by second, kept and told while a measurement runs."""

from __future__ import annotations

from collections.abc import Callable

from dynamo.core.clock import Clock
from dynamo.operations.bench.measure import Measurement

TICK_S = 0.25
TICKS = 4


class Timeline:
    """Events with text of requests that ended, by second."""

    def __init__(
        self,
        measurement: Measurement,
        tell: Callable[[Measurement, float], None] | None,
        clock: Clock,
    ) -> None:
        self._measurement = measurement
        self._tell = tell
        self._clock = clock
        self.per_second: list[int] = []

    async def keep(self) -> None:
        """Until cancelled."""
        began = self._clock.now()
        before = ticks = 0
        while True:
            ticks += 1
            await self._clock.sleep_until(began + ticks * TICK_S)
            if self._tell is not None:
                self._tell(self._measurement, ticks * TICK_S)
            if ticks % TICKS == 0:
                texts = self._measurement.texts
                self.per_second.append(texts - before)
                before = texts
