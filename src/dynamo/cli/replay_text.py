"""What `dynamo replay` shows."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from dynamo.operations.replay.figures import Result
    from dynamo.operations.replay.flight import FlightLog

WIDTH = 24
BAR_S, LINE_S = 0.1, 10.0
CLEAR = "\r\x1b[K"
SPREADS = (("ttft_ms", "TTFT"), ("itl_ms", "ITL"), ("tpot_ms", "TPOT"), ("e2e_ms", "E2E"))
COLUMNS = ("mean", "p50", "p90", "p99")


class Progress:
    """A bar on a terminal; elsewhere a line now and then. `total`: requests of the trace."""

    def __init__(self, out: TextIO, total: int) -> None:
        self._out = out
        self._total = max(1, total)
        self._tty = out.isatty()
        self._every_s = BAR_S if self._tty else LINE_S
        self._told = time.monotonic()

    def __call__(self, log: FlightLog) -> None:
        """How far it is."""
        now = time.monotonic()
        if now - self._told < self._every_s:
            return
        self._told = now
        share = log.completed / self._total
        line = (
            f"[{'#' * round(share * WIDTH):<{WIDTH}}] {share:.0%}  {log.completed} done  "
            f"{len(log.under_way)} in flight  {log.clock.now():.0f} s of virtual time"
        )
        self._out.write(f"{CLEAR}{line}" if self._tty else f"{line}\n")
        self._out.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._tty:
            self._out.write(CLEAR)
            self._out.flush()


def as_text(result: Result) -> str:
    """The result on a few lines."""
    failed = result.requests - result.completed
    lines = [
        f"{result.requests} requests in {result.duration_s:.1f} s of virtual time"
        + (f", {failed} not answered" if failed else "")
        + f"; {result.output_tokens_per_s:.0f} tokens/s",
        f"prompts {result.reuse_first_admission:.1%} cached when first admitted",
        f"{result.evictions} blocks evicted, {result.preemptions} preemptions",
        f"requests a worker: {' '.join(map(str, result.requests_per_worker))}",
        "",
        f"{'ms':<6}" + "".join(f"{name:>12}" for name in COLUMNS),
    ]
    for key, title in SPREADS:
        spread = getattr(result, key)
        lines.append(f"{title:<6}" + "".join(f"{getattr(spread, one):>12.2f}" for one in COLUMNS))
    lines += [f"failed {count:>6}  {error}" for error, count in result.errors.items()]
    lines.append(f"\ntook {result.wall_s:.1f} s ({result.cpu_s:.1f} s of CPU)")
    return "\n".join(lines)
