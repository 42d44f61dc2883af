"""Lines that engines print become log lines of the worker."""

import json
import logging
import subprocess
import sys
from collections.abc import Mapping

import pytest

from dynamo.telemetry.engine_output import EngineOutput, parse_line

VLLM = "INFO 11-23 02:40:01 [core.py:55] Initializing a V1 LLM engine"


@pytest.mark.parametrize(
    ("line", "level", "fields", "message"),
    [
        (VLLM, logging.INFO, {"source": "core.py:55"}, "Initializing a V1 LLM engine"),
        (
            "\x1b[1;36m(EngineCore pid=12)\x1b[0;0m ERROR 11-23 02:40:01 [core.py:9] ValueError: x",
            logging.ERROR,
            {"process": "EngineCore", "source": "core.py:9"},
            "ValueError: x",
        ),
        ("(Worker pid=7) Traceback:", logging.INFO, {"process": "Worker"}, "Traceback:"),
        (
            "[11/23/2026-02:40:01] [TRT-LLM] [W] no such file",
            logging.WARNING,
            {},
            "no such file",
        ),
        ("[2026-11-23 02:40:01 TP0] Load ends.", logging.INFO, {"process": "TP0"}, "Load ends."),
        (
            f"(None pid=3) {VLLM}",
            logging.INFO,
            {"source": "core.py:55"},
            "Initializing a V1 LLM engine",
        ),
        ("plain text", logging.INFO, {}, "plain text"),
    ],
)
def test_the_formats_of_engines_are_parsed(
    line: str, level: int, fields: Mapping[str, str], message: str
) -> None:
    assert parse_line(line) == (level, fields, message)


def test_the_reason_of_a_failure_is_the_last_exception_that_names_one() -> None:
    output = EngineOutput("vllm")
    assert output.failure_reason() == ""

    for line in (
        "(EngineCore pid=1) ERROR 11-23 02:40:01 [core.py:9] Traceback (most recent call last):",
        "(EngineCore pid=1) ERROR 11-23 02:40:01 [core.py:9] ValueError: maximum length is 96",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed: {}",
        "Exception: WorkerProc initialization failed. See stack trace for root cause.",
        "INFO 11-23 02:40:02 [core.py:9] Shutdown",
    ):
        output.log_line(line)

    assert output.failure_reason() == "ValueError: maximum length is 96"


PROGRAM = """
import logging, os, subprocess, sys, time
from dynamo.telemetry.engine_output import EngineOutput, use_own_handlers
from dynamo.telemetry.logs import configure_logging

configure_logging("info", "json", "worker-1")
engine_log = logging.getLogger("vllm")
engine_log.addHandler(logging.StreamHandler(sys.stdout))
engine_log.propagate = False
use_own_handlers("vllm")
output = EngineOutput("dynamo.engines.vllm")
output.open()
engine_log.info("from the client")
child = "print('(EngineCore pid=5) WARNING 11-23 02:40:01 [core.py:9] from the core')"
subprocess.run([sys.executable, "-c", child])
while not any("from the core" in line for line in output._lines):
    time.sleep(0.01)
output.close()
print("restored")
assert logging.LogRecord("x", 20, "", 0, "", None, None).process == os.getpid()
"""


def test_lines_of_child_processes_are_logged_once_and_outputs_are_restored() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=30
    )

    assert result.stdout == "restored\n", result.stderr
    client, core = [json.loads(line) for line in result.stderr.splitlines()]
    assert (client["target"], client["message"], client["level"]) == (
        "vllm",
        "from the client",
        "info",
    )
    assert (core["target"], core["message"], core["level"]) == (
        "dynamo.engines.vllm",
        "from the core",
        "warn",
    )
    assert (core["process"], core["component"]) == ("EngineCore", "worker-1")
