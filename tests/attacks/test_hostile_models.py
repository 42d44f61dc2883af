"""Attacks by the files of a model: a chat template that loops harms no other request."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.attacks.client import bystanders, chat
from tests.faults.cluster import Cluster

LOOPING = (
    "{% if messages[-1]['content'] == 'go' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% elif messages[-1]['content'] == 'grow' %}{% set ns = "
    "namespace(x='ab') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
    "{% elif messages[-1]['content'] == 'wide' %}{{ '{:>1000000000}'.format(1) }}"
    "{% endif %}x{{ messages[-1]['content'] }}"
)


def write_model(tiny_model: Path, folder: Path, template: str) -> Path:
    """Write a model folder like the tiny one with another chat template."""
    folder.mkdir()
    for path in tiny_model.iterdir():
        if path.name != "tokenizer_config.json":
            (folder / path.name).symlink_to(path)
    path = tiny_model / "tokenizer_config.json"
    tokens = json.loads(path.read_text()) if path.exists() else {}
    (folder / path.name).write_text(json.dumps(tokens | {"chat_template": template}))
    return folder


def ask(cluster: Cluster, content: str) -> tuple[int, float, str]:
    answer = chat(cluster.port, messages=[{"role": "user", "content": content}])
    return answer.status, answer.seconds, answer.body.decode()


@pytest.mark.attack(
    "a model's chat template loops, doubles a text or pads it to a gigabyte",
    "the request is a 400; other requests are served by the same process meanwhile",
)
def test_a_looping_chat_template_harms_nobody(
    tiny_model: Path, tmp_path: Path, outcome: Callable[[str], None]
) -> None:
    model = write_model(tiny_model, tmp_path / "model", LOOPING)
    run = tmp_path / "run"
    run.mkdir()
    with Cluster(model, run, workers=1) as cluster:
        frontend = cluster.ready("frontend")[0].pid
        with bystanders(cluster) as seen, ThreadPoolExecutor(4) as threads:
            contents = ["go", "grow", "wide", "go"] * 4
            answers = list(threads.map(lambda content: ask(cluster, content), contents))
            assert ask(cluster, "Hi")[0] == 200
        assert [status for status, _, _ in answers] == [400] * len(answers), answers
        assert all("chat template" in body for _, _, body in answers)
        assert seen.errors == []
        assert seen.longest_gap_s < 2
        assert seen.longest_live_s < 2
        assert seen.worst_growth_mb < 150
        assert cluster.ready("frontend")[0].pid == frontend
    slowest = max(seconds for _, seconds, _ in answers)
    outcome(f"400 within {slowest:.2f} s, longest gap of others {seen.longest_gap_s:.2f} s")
