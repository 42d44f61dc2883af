"""More requests than the workers can take, in a deployment."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest


@pytest.mark.parametrize("mode", ["round_robin", "kv"])
def test_some_requests_are_answered_and_the_others_get_retry_after(
    start: Any, tiny_model: Any, mode: str
) -> None:
    running = start(
        *("out=mock", tiny_model, "--model-name", "tiny", "--workers", 2),
        *("--max-num-seqs", 2, "--timing", "constant:0.01,10", "--router-mode", mode),
        *("--ttft-slo", 0.8),
    )

    def ask(number: int) -> tuple[int, str, str]:
        body = {"model": "tiny", "prompt": f"request {number}", "max_tokens": 50}
        request = urllib.request.Request(
            running.url + "/v1/completions",
            json.dumps(body | {"ignore_eos": True}).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, "", answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers["retry-after"], error.read().decode()

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(ask, range(4)))
        answers = list(pool.map(ask, range(4, 28)))

    answered = [text for status, _, text in answers if status == 200]
    refused = [(retry_after, text) for status, retry_after, text in answers if status == 503]
    assert len(answered) + len(refused) == 24
    assert len(answered) >= 4
    assert len(refused) >= 4
    assert all(json.loads(text)["usage"]["completion_tokens"] == 50 for text in answered)
    assert all(int(retry_after) >= 1 for retry_after, _ in refused)
    assert {json.loads(text)["error"]["code"] for _, text in refused} == {"overloaded"}
    metrics = running.get("/metrics")[1]
    assert "dynamo_admission_rejected_total{" in metrics
    assert 'dynamo_admission_waiting_requests{model="tiny"} 0' in metrics
