"""Part of a simulated day: the books of `dynamo slo` have what the clients counted."""

from __future__ import annotations

from pathlib import Path

from tests.simulation.chaos.faults import FaultSchedule
from tests.simulation.slo_day import SloDay, run_slo_day

FAULTS = FaultSchedule(120.0, 90.0, (5.0, 20.0), event_loss_every_s=60.0)
MINUTES = SloDay(
    hours=0.1,
    rate=1.0,
    burst_every=5,
    faults=FAULTS,
    frontend_every_s=100.0,
    observer_every_s=100.0,
)


def test_the_books_have_what_clients_counted(tmp_path: Path) -> None:
    result = run_slo_day(MINUTES, tmp_path / "slo.sqlite")
    assert result.report == result.clients
    assert result.clients[0] > 1_000
    assert all(result.kinds[kind] > 5 for kind in ("good", "late", "failed", "client", "left"))
    assert result.crashes > 5
    assert result.observers > 2
    assert result.difference_s == 0.0
