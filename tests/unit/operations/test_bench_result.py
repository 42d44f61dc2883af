from __future__ import annotations

import gzip
import itertools
import json
import struct
from array import array
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from dynamo.core.errors import ConfigError
from dynamo.operations.bench import bench_plot
from dynamo.operations.bench.bench_plot import draw_bench_results
from dynamo.operations.bench.bench_result import (
    BenchResult,
    BenchRun,
    compare,
    compute_result,
    differing_settings,
    read_result,
)
from dynamo.operations.bench.load_generator import (
    schedule_sessions,
    synthetic_sessions,
)
from dynamo.operations.bench.prompts import PromptGenerator, request_body
from dynamo.operations.bench.request_sample import RequestSample, ServerUsage
from dynamo.operations.bench.traces import read_mooncake, read_sharegpt
from dynamo.operations.bench.workload import (
    BenchTarget,
    LatencyObjectives,
    LoadProfile,
    RequestPlan,
    RequestShape,
)
from dynamo.operations.latency_summary import LatencyHistogram, summarize_latencies
from dynamo.operations.plotting import make_panels


def sample(sent: float, first: float, gap: float, events: int, error: str = "") -> RequestSample:
    result = RequestSample(array("d"))
    result.sent_at, result.first_text_at = sent, first
    result.last_text_at = result.ended_at = first + gap * (events - 1)
    result.text_events, result.error = events, error
    result.usage = ServerUsage(10, events, 5)
    return result


def result_of(*samples: RequestSample, **objectives: float) -> BenchResult:
    gaps = array("d", [0.01, 0.02, 0.03])
    return compute_result(BenchRun(list(samples), gaps, 0.0, 2.0), LatencyObjectives(**objectives))


def test_the_metrics_of_a_run() -> None:
    result = result_of(
        sample(0, 0.1, 0.01, 11), sample(1, 1.3, 0.02, 11), sample(1, 1.1, 0, 1, "http 503")
    )

    assert (result.requests, result.failed, result.errors) == (2, 1, {"http 503": 1})
    assert result.requests_per_s == 1.0
    assert result.output_tokens == 22
    assert result.cached_ratio == 0.5
    assert result.ttft_ms.p50 == 100.0
    assert result.ttft_ms.max == 300.0
    assert result.tpot_ms.p99 == 20.0
    assert result.itl_ms.mean == 20.0
    assert result.goodput is None


def test_goodput_counts_requests_that_met_both_objectives() -> None:
    samples = [sample(0, 0.1, 0.01, 11), sample(0, 0.3, 0.01, 11), sample(0, 0.1, 0.05, 11)]
    goodput = result_of(*samples, sample(0, 0.1, 0.01, 2, "x"), ttft_ms=200, itl_ms=20).goodput

    assert goodput is not None
    assert (goodput.requests, goodput.ratio, goodput.requests_per_s) == (1, 0.25, 0.5)


def test_percentiles_are_measured_values() -> None:
    summary = summarize_latencies([milliseconds / 1000 for milliseconds in range(1, 101)])

    assert (summary.p50, summary.p90, summary.p99, summary.max) == (50, 90, 99, 100)
    assert summary.p999 == 100
    assert summarize_latencies([number / 1000 for number in range(1, 2001)]).p999 == 1998
    assert summary.curve[0] == 1
    assert summary.curve[100] == 100


def test_a_histogram_agrees_with_the_exact_distribution_within_a_thousandth() -> None:
    seconds = [(number % 997 + 1) / 1000 for number in range(5000)]
    histogram = LatencyHistogram()
    for value in seconds:
        histogram.add(value)
    exact, counted = summarize_latencies(seconds), histogram.summarize()

    assert counted.n == exact.n
    assert counted.mean == pytest.approx(exact.mean)
    assert counted.max == pytest.approx(exact.max, rel=1e-3)
    assert counted.curve == pytest.approx(exact.curve, rel=1e-3)
    assert LatencyHistogram().summarize() == summarize_latencies([])


def test_gaps_between_times_are_counted_like_single_ones() -> None:
    ends = [0.0, 0.0, *(0.5 + number * number * 1e-5 for number in range(40_000))]
    together, singly = LatencyHistogram(), LatencyHistogram()
    together.add_gaps(np.array(ends), 3)
    together.add(2.0)
    for before, after in itertools.pairwise(ends):
        singly.add(after - before, 3)
    singly.add(2.0)

    assert together.summarize() == singly.summarize()
    assert together.summarize().n == 3 * (len(ends) - 1) + 1
    assert together.summarize().curve[0] == 0.0


def test_a_run_without_responses_has_a_result() -> None:
    assert result_of().ttft_ms.n == 0


def test_two_results_are_compared_metric_by_metric(tmp_path: Path) -> None:
    first = replace(
        result_of(sample(0, 0.1, 0.01, 11)), settings={"load": {"rate": 1}, "name": "a"}
    )
    second = replace(
        result_of(sample(0, 0.2, 0.01, 11)), settings={"load": {"rate": 2}, "name": "b"}
    )
    rows = {row.figure: row for row in compare(first, second)}

    assert rows["ttft_ms.p50"].change == pytest.approx(1.0)
    assert rows["ttft_ms.p50"].better is False
    assert rows["requests_per_s"].better is None
    assert differing_settings(first, second) == ["load.rate"]
    path = tmp_path / "a.json"
    path.write_bytes(msgspec.json.encode(first))
    assert read_result(str(path)).ttft_ms == first.ttft_ms


@pytest.mark.parametrize(("text", "word"), [(None, "No such file"), ("[]", "is not a result")])
def test_a_file_that_is_not_a_result_is_rejected(
    tmp_path: Path, text: str | None, word: str
) -> None:
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=word):
        read_result(str(path))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_plot_is_a_png_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.png"
    draw_bench_results(
        [replace(result_of(sample(0, 0.1, 0.01, 11)), name="a", timeline=[1, 2])], str(path)
    )
    data = path.read_bytes()

    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1000
    assert height > 500


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_plot_shows_the_objectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    figure, panels = make_panels()
    monkeypatch.setattr(bench_plot, "make_panels", lambda: (figure, panels))
    result = result_of(sample(0, 0.1, 0.01, 11), ttft_ms=200, itl_ms=5000)
    draw_bench_results([result, result], str(tmp_path / "a.png"))
    ttft, itl, e2e, _ = figure.axes

    assert [list(line.get_xdata()) for line in ttft.lines if len(line.get_xdata()) == 2] == [
        [200, 200]
    ]
    labels = [text.get_text() for text in ttft.get_legend().get_texts()]
    assert labels[-1] == "--slo-ttft 200 ms"
    assert itl.get_xlim()[1] < 100  # a limit far above would squeeze the curve
    assert "--slo-itl 5000 ms" in itl.get_legend().get_texts()[-1].get_text()
    assert len(e2e.lines) == 2


def test_poisson_arrivals_have_their_rate_and_ramps_grow() -> None:
    steady = list(LoadProfile(rate=50, duration_s=100, seed=3).start_times())
    ramp = list(LoadProfile(rate=10, rate_to=90, duration_s=100, seed=3).start_times())

    assert len(steady) == pytest.approx(5000, rel=0.05)
    assert len(ramp) == pytest.approx(5000, rel=0.05)
    assert sum(start_s < 50 for start_s in ramp) == pytest.approx(1500, rel=0.1)
    assert steady == sorted(steady)
    assert list(LoadProfile(rate=50, duration_s=100, seed=3).start_times()) == steady


def test_even_arrivals_and_a_falling_ramp() -> None:
    even = LoadProfile(rate=2, even=True, duration_s=2)

    assert list(even.start_times()) == [0.5, 1.0, 1.5, 2.0]
    assert (
        len(list(LoadProfile(rate=20, rate_to=0.001, duration_s=10, even=True).start_times()))
        == 100
    )
    sessions = schedule_sessions(synthetic_sessions(RequestShape()), even)
    starts = [session.start_s for session in sessions]
    assert starts == [0.5, 1.0, 1.5, 2.0]


WORDS = [f"w{number}" for number in range(50)]


def test_prompts_have_the_configured_number_of_words() -> None:
    prompts = PromptGenerator(
        WORDS, RequestShape(input_tokens=40, prefix_share=0.5, prefixes=1), 7, 16
    )
    first, second = (prompts.make_prompt(RequestPlan(40, 1)).split() for _ in range(2))

    assert len(first) == len(second) == 40
    assert first[:20] == second[:20]
    assert first[20:] != second[20:]


def test_blocks_of_a_trace_are_the_same_words_every_time() -> None:
    first = (
        PromptGenerator(WORDS, RequestShape(), 1, 4)
        .make_prompt(RequestPlan(10, 1, hash_ids=[1, 2, 3]))
        .split()
    )
    second = (
        PromptGenerator(WORDS, RequestShape(), 2, 4)
        .make_prompt(RequestPlan(14, 1, hash_ids=[1, 2, 9]))
        .split()
    )

    assert len(first) == 10
    assert len(second) == 14
    assert first[:8] == second[:8]
    assert first[8:] != second[8:10]


def test_bodies_of_both_routes() -> None:
    messages = [{"role": "user", "content": "hi"}]
    chat = request_body(BenchTarget(extra={"temperature": 0}), messages, RequestPlan(1, 5))
    text = request_body(
        BenchTarget(completions=True, ignore_eos=False), messages, RequestPlan(1, 5)
    )

    assert chat["messages"] == messages
    assert (chat["max_tokens"], chat["temperature"], chat["ignore_eos"]) == (5, 0, True)
    assert text["prompt"] == "hi"
    assert "ignore_eos" not in text


ROWS: list[dict[str, Any]] = [
    {"timestamp": 2000, "input_length": 9, "output_length": 0, "hash_ids": [0, 1]},
    {"timestamp": 1000, "input_length": 5, "output_length": 7, "hash_ids": [0], "session_id": "a"},
    {"input_length": 6, "output_length": 2, "hash_ids": [0, 2], "session_id": "a", "delay": 500},
]


def test_a_mooncake_trace_with_sessions(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write("\n".join(map(json.dumps, ROWS)) + "\n\n")
    first, second = read_mooncake(str(path), speed=2)

    assert (first.start_s, second.start_s) == (0.0, 0.5), "the first starts at once"
    assert [turn.delay_s for turn in first.turns] == [0.0, 0.25]
    assert second.turns[0].output_tokens == 1
    assert len(read_mooncake(str(path), rows=2)) == 2
    assert not first.history


def test_an_invalid_trace_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"input_length": 1, "output_length": 1}\n{"input_length": "x"}\n')
    with pytest.raises(ConfigError, match=r"t\.jsonl:2"):
        read_mooncake(str(path))


def test_a_sharegpt_file(tmp_path: Path) -> None:
    conversation = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "one two"},
        {"from": "gpt", "value": "a b c"},
        {"from": "human", "value": "three"},
        {"from": "gpt", "value": "d"},
    ]
    path = tmp_path / "s.json"
    path.write_text(json.dumps([{"conversations": conversation}, {"conversations": []}]))
    count = lambda text: len(text.split())  # noqa: E731
    (whole,) = read_sharegpt(str(path), count, turns=0)
    (cut,) = read_sharegpt(str(path), count)
    turns = [(turn.text, turn.output_tokens) for turn in whole.turns]

    assert turns == [("one two", 3), ("three", 1)]
    assert whole.history
    assert len(cut.turns) == 1


def test_synthetic_sessions_are_endless() -> None:
    first, _ = itertools.islice(synthetic_sessions(RequestShape(turns=3)), 2)

    assert len(first.turns) == 3
    assert first.history
