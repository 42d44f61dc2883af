"""Predictions of rows in AI Configurator's columns."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.operations.configure.measured import MeasuredRow, read_silicon, shipped_rows
from dynamo.operations.configure.predictor import Predictor, load_constants, predict_rows

ROW = {
    "id": "2026_04_06_llama_3_1_70b_h100_sxm_vllm_fp8_agg_1024x1024_c32_tp4_ep1_7",
    "silicon_data_source": "source_file=2026-04-06.csv; silicon_concurrency=32; "
    "measured=2025-10-29T00:00:00.000Z",
    "backend": "vllm",
    "backend_version": "",
    "model_path": "meta-llama/Llama-3.1-70B",
    "system": "h100_sxm",
    "precision": "fp8",
    "mode": "agg",
    "isl": "1024",
    "osl": "1024",
    "batch_size": "32",
    "tp_size": "4",
    "attention_dp_size": "1",
    "moe_tp_size": "4",
    "moe_ep_size": "1",
}
SPLIT = {
    "mode": "disagg",
    "id": "dsr1_b200_trtllm_fp4_disagg_1024x1024_c25_cfg320",
    "silicon_data_source": "db-dump; silicon_concurrency=25; measured=2026-01-29T00:00:00.000Z",
    "backend": "trtllm",
    "model_path": "deepseek-ai/DeepSeek-V3",
    "system": "b200_sxm",
    "precision": "fp4",
    "tp_size": "",
    "prefill_num_workers": "1",
    "prefill_tp_size": "1",
    "prefill_attention_dp_size": "4",
    "decode_num_workers": "5",
    "decode_tp_size": "8",
    "decode_attention_dp_size": "1",
    "decode_batch_size": "5",
}


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor.shipped()


def write(path: Path, *changes: dict[str, str]) -> Path:
    rows = [{**ROW, **change} for change in changes]
    names = {name: None for row in rows for name in row}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(names))
        writer.writeheader()
        writer.writerows(rows)
    return path


def read_one(path: Path, **change: str) -> MeasuredRow:
    (row,) = read_silicon(write(path, change))
    assert isinstance(row, MeasuredRow)
    return row


@pytest.mark.parametrize(
    ("change", "gpus"),
    [
        ({}, 4),
        ({"id": "x_c8_tp8_0_ep8_0_2", "tp_size": "64", "moe_tp_size": "8", "moe_ep_size": "8"}, 8),
        ({"id": "x_cfg1", "tp_size": "64", "moe_tp_size": "8", "moe_ep_size": "8"}, 8),
        ({"id": "x_cfg1", "tp_size": "4", "attention_dp_size": "4", "moe_tp_size": "1"}, 4),
        (
            {
                "id": "x_cfg1",
                "tp_size": "1",
                "attention_dp_size": "64",
                "moe_tp_size": "8",
                "moe_ep_size": "8",
            },
            8,
        ),
    ],
)
def test_the_gpus_of_a_replica_are_read_from_columns_that_count_some_twice(
    tmp_path: Path, change: dict[str, str], gpus: int
) -> None:
    assert read_one(tmp_path / "rows.csv", **change).gpus == gpus


def test_concurrency_is_that_of_the_source_then_of_the_id(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"

    assert read_one(path, batch_size="8").concurrency == 32
    named = "a_c64_tp4_ep1_1"
    assert read_one(path, silicon_data_source="", batch_size="", id=named).concurrency == 64


def test_rows_are_predicted_with_bars_in_the_order_of_the_file(
    tmp_path: Path, predictor: Predictor
) -> None:
    path = write(tmp_path / "rows.csv", {}, SPLIT, {"id": "b_c8_tp4_ep1_1"})

    results = predict_rows(path, predictor, hide_combination=False)

    assert [row["id"] for row in results] == [ROW["id"], SPLIT["id"], "b_c8_tp4_ep1_1"]
    for row in results:
        for name in ("ttft_ms", "tpot_ms"):
            assert 0 < row[f"{name}_low"] < row[name] < row[f"{name}_high"] < math.inf


def test_a_measured_run_is_predicted_nearly_exactly_unless_it_is_hidden(
    tmp_path: Path, predictor: Predictor
) -> None:
    path = write(tmp_path / "rows.csv", {})
    (known,) = (
        row
        for row in shipped_rows()
        if (row.model, row.gpu, row.engine, row.gpus, row.isl, row.osl, row.concurrency)
        == ("meta-llama/Llama-3.1-70B", "h100_sxm", "vllm", 4, 1024, 1024, 32)
    )

    (shown,) = predict_rows(path, predictor, hide_combination=False)
    (hidden,) = predict_rows(path, predictor, hide_combination=True)

    def width(row: dict[str, Any]) -> float:
        return float(row["tpot_ms_high"] / row["tpot_ms_low"])

    assert shown["tpot_ms"] == pytest.approx(known.tpot_ms, rel=0.03)
    assert width(hidden) - 1 > 2 * (width(shown) - 1)
    assert hidden["tpot_ms"] == pytest.approx(known.tpot_ms, rel=0.5)


def test_measured_times_in_the_file_are_not_looked_at(tmp_path: Path, predictor: Predictor) -> None:
    plain = predict_rows(write(tmp_path / "a.csv", {}), predictor, hide_combination=False)
    times = {"silicon_ttft_ms": "1", "silicon_tpot_ms": "99"}
    with_times = predict_rows(write(tmp_path / "b.csv", times), predictor, hide_combination=False)

    assert plain == with_times


def test_a_row_that_cannot_be_read_is_an_error_among_the_others(
    tmp_path: Path, predictor: Predictor
) -> None:
    path = write(
        tmp_path / "rows.csv",
        {"system": "h100"},
        {},
        {"isl": "nan"},
        {"model_path": "nobody/none"},
        {"osl": ""},
    )

    results = predict_rows(path, predictor, hide_combination=False)

    assert ["error" in row for row in results] == [True, False, True, True, True]
    assert "unknown GPU 'h100'" in results[0]["error"]


def test_a_file_without_the_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n")

    with pytest.raises(ConfigError, match="lacks the columns id"):
        list(read_silicon(path))


def test_constants_stay_within_physical_bounds() -> None:
    constants, _ = load_constants()

    shares = ("bandwidth", "arithmetic", "memory_share")
    assert len(constants) <= 60
    assert all(
        0 < value <= 1 for name, value in constants.items() if any(part in name for part in shares)
    )
