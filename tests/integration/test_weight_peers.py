"""A deployment that reads the weights of its workers from a worker of another one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import Deployment, until
from tests.support.native_model import write_native_model

CHAT = {"messages": [{"role": "user", "content": "fox"}], "max_tokens": 6, "temperature": 0}


@pytest.mark.skipif(sys.platform != "linux", reason="needs memfd")
def test_a_second_deployment_reads_the_weights_of_the_first(
    start: Callable[..., Deployment], tmp_path: Path
) -> None:
    model = write_native_model(tmp_path / "tiny")
    folder = tmp_path / "discovery"
    folder.mkdir(mode=0o700)
    words = ("out=native", model, "--threads", 1, "--discovery", f"file:{folder}")

    def start_one(*more: object) -> Deployment:
        return start(*words, "--transfer-plane", "tcp:", *more)

    first = start_one()
    until(lambda: any(b"/weights/" in file.read_bytes() for file in folder.glob("*/?*")))
    text = first.post("/v1/chat/completions", CHAT)[1]["choices"][0]["message"]["content"]
    second = start_one()  # its frontend serves as soon as it sees the first one's worker
    until(lambda: "weights are read from a peer" in second.log.read_text())
    until(lambda: second.log.read_text().count("worker serves"))
    first.stop()
    answer = second.post("/v1/chat/completions", CHAT)[1]["choices"][0]["message"]["content"]
    assert answer == text
    other = start_one("--namespace", "other")
    assert "weights are read from a peer" not in other.log.read_text()
    alone = start("out=native", model, "--threads", 1)
    assert "offered" not in alone.log.read_text()
