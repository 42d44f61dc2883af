"""What `dynamo replay` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo.cli.bar import ProgressBar, render_bar
from dynamo.core.errors import Overloaded

if TYPE_CHECKING:
    from dynamo.operations.replay.figures import ReplayResult
    from dynamo.operations.replay.flight import ReplayLog

REPLAY_LATENCY_ROWS = (
    ("ttft_ms", "TTFT"),
    ("itl_ms", "ITL"),
    ("tpot_ms", "TPOT"),
    ("e2e_ms", "E2E"),
)
REPLAY_COLUMNS = ("mean", "p50", "p90", "p99")


class ReplayProgress:
    """Shows on `bar` how far a replay is. `total`: requests of the trace."""

    def __init__(self, bar: ProgressBar, total: int) -> None:
        self._bar = bar
        self._total = max(1, total)

    def __call__(self, log: ReplayLog) -> None:
        """How far it is."""
        if not self._bar.should_redraw():
            return
        share = log.completed / self._total
        self._bar.show(
            f"{render_bar(share)} {share:.0%}  {log.completed} done  {len(log.in_flight)} in flight  "
            f"{log.clock.now():.0f} s of virtual time"
        )


def format_replay_result(result: ReplayResult) -> str:
    """The result on a few lines."""
    failed = result.requests - result.completed - result.rejected
    lines = [
        f"{result.requests} requests in {result.duration_s:.1f} s of virtual time"
        + (f", {result.rejected} rejected" if result.rejected else "")
        + (f", {failed} not answered" if failed else "")
        + f"; {result.output_tokens_per_s:.0f} tokens/s",
        f"prompts {result.reuse_first_admission:.1%} cached when first admitted",
        f"{result.evictions} blocks evicted, {result.preemptions} preemptions",
        f"requests a worker: {' '.join(map(str, result.requests_per_worker))}",
        "",
        f"{'ms':<6}" + "".join(f"{name:>12}" for name in REPLAY_COLUMNS),
    ]
    for key, title in REPLAY_LATENCY_ROWS:
        spread = getattr(result, key)
        lines.append(
            f"{title:<6}" + "".join(f"{getattr(spread, one):>12.2f}" for one in REPLAY_COLUMNS)
        )
    lines.append(f"{'rejected':<10}{result.rejected:>8}")
    others = [(error, count) for error, count in result.errors.items() if error != Overloaded.code]
    lines += [f"{'failed':<10}{count:>8}  {error}" for error, count in others]
    lines.append(f"\ntook {result.wall_s:.1f} s ({result.cpu_s:.1f} s of CPU)")
    return "\n".join(lines)
