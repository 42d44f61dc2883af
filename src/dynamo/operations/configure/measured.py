"""Measured rows: those that came with this package, a file in AI Configurator's columns, and what
of a row is predicted."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.operations.configure.cases import Case
from dynamo.operations.configure.catalogue import DATA, find_engine, find_gpu, known_name, models

TABLE = DATA / "measured.csv"
PRECISIONS = {"nvfp4": "fp4", "mxfp4": "fp4", "fp8_block": "fp8", "int4_wo": "int4"}
COLUMNS = ("id", "backend", "model_path", "system", "mode", "isl", "osl")
MOST_ROWS = 200_000
ROWS_HINT = "the columns are those of AI Configurator's silicon_sample.csv"


class MeasuredRow(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a closed loop. With `prefill_workers` the other fields of a replica are those of one
    decode worker, and `concurrency` is that of all; 0 decode workers are an unknown number. A doubt
    above 1 says that a row contradicts rows like it."""

    id: str = ""
    engine: str
    version: str = ""
    day: str = ""
    model: str
    gpu: str
    precision: str
    gpus: int
    attention_dp: int = 0
    split_experts: int = 0
    isl: int
    osl: int
    concurrency: float
    first_wave: int = 0
    prefill_gpus: int = 0
    prefill_attention_dp: int = 0
    prefill_workers: int = 0
    decode_workers: int = 0
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    ttft_doubt: float = 1.0
    tpot_doubt: float = 1.0

    @property
    def combination(self) -> str:
        """Model, GPU, engine and precision, by which rows are hidden."""
        return f"{self.model} {self.gpu} {self.engine} {self.precision}"

    def case(self) -> Case:
        """Return the replica, or one decode worker with its share of the requests."""
        shape = models()[self.model]
        if shape.precision != "fp4" or self.precision == "int4":  # gpt-oss stays in its own fp4
            shape = shape.with_precision(self.precision)
        return Case(
            shape=shape,
            family=self.model,
            gpu=find_gpu(self.gpu),
            engine=self.engine,
            gpus=self.gpus,
            attention_dp=bool(self.attention_dp),
            split_experts=bool(self.split_experts),
            isl=self.isl,
            osl=self.osl,
            concurrency=self.concurrency / max(1, self.decode_workers),
            first_wave=bool(self.first_wave),
            version=self.version,
            day=self.day,
        )

    def prefill_case(self) -> Case:
        """Return one prefill worker of the row, with one prompt at a time."""
        return msgspec.structs.replace(
            self.case(),
            gpus=self.prefill_gpus,
            attention_dp=bool(self.prefill_attention_dp),
            concurrency=1.0,
            first_wave=False,
        )


def shipped_rows() -> Sequence[MeasuredRow]:
    """Return the measured rows of `data/measured.csv`."""
    lines = TABLE.read_text().splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return [_convert(row) for row in rows]


def _convert(row: Mapping[str, str]) -> MeasuredRow:
    return msgspec.convert({k: v for k, v in row.items() if v}, MeasuredRow, strict=False)


def read_silicon(path: Path) -> Iterator[MeasuredRow | ConfigError]:
    """Read rows in the columns of AI Configurator's file of measured runs, with or without the
    measured times. A row that cannot be read is its error. Raises `ConfigError` for the file."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(
                    f"{path} lacks the columns {', '.join(missing)}",
                    hint=ROWS_HINT,
                )
            for number, row in enumerate(reader):
                if number >= MOST_ROWS:
                    raise ConfigError(f"{path} has more than {MOST_ROWS} rows")
                yield _read_silicon_row({k: v or "" for k, v in row.items() if k})
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read {path}: {reason}", hint=ROWS_HINT) from error


def _read_silicon_row(row: Mapping[str, str]) -> MeasuredRow | ConfigError:
    try:
        return SiliconRow(row).read()
    except (ConfigError, ValueError, OverflowError) as error:
        return ConfigError(f"row {row.get('id', '')!r}: {error}")


class SiliconRow:
    """A row of AI Configurator's file. Its source column says what its own columns leave out; its
    sizes of parallelism count some GPUs twice, so that the id is asked first."""

    def __init__(self, row: Mapping[str, str]) -> None:
        self._row = row
        self._source = row.get("silicon_data_source", "")

    def read(self) -> MeasuredRow:
        """Return the row. Raises `ConfigError` and `ValueError`."""
        row = self._row
        model = known_name(row["model_path"])
        if model not in models():
            raise ConfigError(f"unknown model {row['model_path']!r}")
        common = MeasuredRow(
            id=row["id"],
            engine=find_engine(row["backend"]).name,
            version=row.get("backend_version", ""),
            day=self._find(r"measured=(\d{4}-\d\d-\d\d)") or "",
            model=model,
            gpu=find_gpu(row["system"]).name,
            precision=self._precision(),
            gpus=1,
            isl=self._positive("isl"),
            osl=self._positive("osl"),
            concurrency=1.0,
            first_wave=int("source_file=/Users" in self._source),
            ttft_ms=float(row.get("silicon_ttft_ms") or 0),
            tpot_ms=float(row.get("silicon_tpot_ms") or 0),
        )
        return self._apart(common) if row["mode"] == "disagg" else self._together(common)

    def _together(self, common: MeasuredRow) -> MeasuredRow:
        tensor, data, moe, experts = self._sizes("")
        named = re.search(r"_tp(\d+)(?:_0)?_ep(\d+|none)", self._row["id"])
        if named:
            gpus = int(named[1])
        elif data > 1:
            gpus = moe if tensor == 1 and moe == experts else round(math.sqrt(tensor * data))
        else:
            gpus = moe if moe == experts and tensor == moe * experts else tensor
        split = int(named[2]) > 1 if named and named[2] != "none" else experts > 1
        batch = self._number("batch_size")
        concurrency = self._concurrency() or batch or 1.0
        if batch and concurrency > 1.5 * batch * gpus:  # several replicas behind one row
            concurrency = batch * gpus
        return msgspec.structs.replace(
            common,
            gpus=gpus,
            attention_dp=int(data > 1),
            split_experts=int(split),
            concurrency=concurrency,
        )

    def _apart(self, common: MeasuredRow) -> MeasuredRow:
        tensor, data, _, _ = self._sizes("prefill_")
        prefill_gpus = tensor * data
        tensor, decode_data, _, experts = self._sizes("decode_")
        workers = int(self._number("decode_num_workers"))
        batch = self._number("decode_batch_size")
        return msgspec.structs.replace(
            common,
            gpus=tensor * decode_data,
            attention_dp=int(decode_data > 1),
            split_experts=int(experts > 1),
            concurrency=self._concurrency() or batch * max(1, workers) or 1.0,
            prefill_gpus=prefill_gpus,
            prefill_attention_dp=int(data > 1),
            prefill_workers=self._count("prefill_num_workers"),
            decode_workers=workers,
            first_wave=0,
        )

    def _precision(self) -> str:
        row = self._row
        name = row["model_path"].upper()
        named = "fp4" if "FP4" in name else "fp8" if "FP8" in name else "bf16"
        precision = row.get("precision") or row.get("gemm_quant_mode") or named
        precision = PRECISIONS.get(precision, precision)
        if precision not in {"bf16", "fp16", "fp8", "fp4", "int8", "int4"}:
            raise ConfigError(f"unknown precision {precision!r}")
        return precision

    def _concurrency(self) -> float:
        named = re.search(r"_c(\d+)_", self._row["id"])
        return float(self._find(r"silicon_concurrency=(\d+)") or (named[1] if named else 0))

    def _find(self, pattern: str) -> str | None:
        match = re.search(pattern, self._source)
        return match[1] if match else None

    def _number(self, name: str) -> float:
        value = float(self._row.get(name) or 0)
        if not 0 <= value < 1e9:
            raise ConfigError(f"{name} is {value}")
        return value

    def _count(self, name: str) -> int:
        return int(self._number(name)) or 1

    def _positive(self, name: str) -> int:
        if not (value := int(self._number(name))):
            raise ConfigError(f"{name} is missing")
        return value

    def _sizes(self, prefix: str) -> tuple[int, int, int, int]:
        """Return the GPUs for tensors, for sequences, and for experts in both ways."""
        ends = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
        tensor, data, moe, experts = (self._count(prefix + end) for end in ends)
        return tensor, data, moe, experts
