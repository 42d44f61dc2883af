"""Arrivals of requests."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path
from random import Random
from statistics import mean, pstdev

import pytest

from dynamo.core.errors import ConfigError
from dynamo.operations.arrivals import Arrivals, SyntheticLoad, read_windows

HEADER = (
    "t_s,rate_rps,active_clients,rate_weighted_cv,rate_with_lengths_rps,mean_in_tok,mean_out_tok"
)


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_the_times_between_arrivals_vary_as_asked(cv: float) -> None:
    times = list(islice(Arrivals(20.0, cv=cv).times(Random(1)), 20_000))
    gaps = [after - before for before, after in pairwise(times)]
    assert mean(gaps) == pytest.approx(0.05, rel=0.1)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.1, abs=1e-6)


def test_a_day_begins_low_and_peaks_in_the_middle() -> None:
    times = list(Arrivals(5.0, 25.0, duration_s=200.0, day_s=100.0).times(Random(2)))
    hours = [sum(start <= time < start + 10 for time in times) for start in range(0, 200, 10)]
    assert len(times) == pytest.approx(3_000, rel=0.06)
    for day in (hours[:10], hours[10:]):
        assert max(day[0], day[-1]) < 110 < 200 < min(day[4], day[5])


def test_a_ramp_may_fall_to_nothing() -> None:
    times = list(Arrivals(20.0, 1e-9, duration_s=10.0, cv=0.0).times(Random(0)))
    assert len(times) in (99, 100)
    assert times == sorted(times)
    assert times[49] == pytest.approx(10 - 50**0.5, rel=1e-3)


def write_windows(path: Path, *rows: str) -> str:
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    return str(path)


def test_windows_have_their_rates_and_lengths(tmp_path: Path) -> None:
    path = write_windows(
        tmp_path / "w.csv", "0,100,9,1.5,90,300,100", "600,0,0,0,0,0,0", "1200,200,9,2,90,900,50"
    )
    load = SyntheticLoad(0, 0, 10_000, rate=2.0, windows=path)
    drawn = [each for each in load.draw(Random(3)) if isinstance(each, tuple)]
    first = [each for each in drawn if each[0] < 600]
    last = [each for each in drawn if each[0] >= 1200]
    assert len(drawn) == pytest.approx(3_600, rel=0.1)
    assert len(first) + len(last) == len(drawn)
    assert len(last) / len(first) == pytest.approx(2.0, rel=0.15)
    assert mean(each[1] for each in first) == pytest.approx(300, rel=0.15)
    assert mean(each[2] for each in last) == pytest.approx(50, rel=0.15)
    assert drawn == sorted(drawn)


@pytest.mark.parametrize("rows", [[], ["0,1,1,1,1,1,1"], ["0,x,1,1,1,1,1"], ["0,0,1,1,1,1,1"] * 2])
def test_other_files_are_no_windows(tmp_path: Path, rows: list[str]) -> None:
    path = write_windows(tmp_path / "w.csv", *rows)
    with pytest.raises(ConfigError, match=r"w\.csv"):
        read_windows(path)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    for other in (tmp_path / "other.csv", tmp_path / "none.csv"):
        with pytest.raises(ConfigError, match=other.name):
            read_windows(str(other))
