"""A request that is copied for each choice or prompt takes its share and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.attacks.client import CHAT, COMPLETIONS, Bystanders, bystanders, exchange, request_bytes
from tests.faults.cluster import Cluster
from tests.faults.stream_client import body_of

BASE_GROWTH_MB = 64
GROWTH_PER_BODY = 4
LONGEST_GAP_S = 3.0
"""The bar is 0.3 s on a quiet machine. Tests run beside others."""
HARM = ("connection aborted", "connection broke", "does not answer", "worker ejected")

AT_LIMITS: dict[str, Any] = {
    "cache_salt": "s" * 256,
    "stop_token_ids": list(range(300, 556)) * 4,
    "logit_bias": {str(token % 556): 0.5 for token in range(1024)},
    "stop": ["never " * 150 + str(number) for number in range(64)],
    "user": "u" * 1024,
}


def attack(
    deployment: Cluster, body: dict[str, Any], path: str = CHAT
) -> tuple[int, dict[str, Any], Bystanders]:
    """Send one request beside calm streams. Returns status, error and what others noticed."""
    logged = len(deployment.log)
    data = request_bytes(body, path)
    with bystanders(deployment) as seen:
        answer = exchange(deployment.port, data, 60)
    lines = deployment.log[logged:].splitlines()
    assert not [line for line in lines if any(harm in line for harm in HARM)]
    assert seen.errors == []
    assert seen.worst_growth_mb < GROWTH_PER_BODY * len(data) / 1e6 + BASE_GROWTH_MB
    assert seen.longest_gap_s < LONGEST_GAP_S
    return answer.status, answer.error if answer.status != 200 else {}, seen


def chat_body(**fields: Any) -> dict[str, Any]:
    return body_of(0, 2, 4) | {"stream": False, "stream_options": None} | fields


def completion_body(prompts: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompts, "max_tokens": 2, **fields}


def describe(status: int, seen: Bystanders) -> str:
    return f"{status}; + {seen.worst_growth_mb:.0f} MB, longest gap {seen.longest_gap_s:.2f} s"


TOO_LARGE: dict[str, Any] = {
    "cache_salt": "s" * (20 << 20),
    "stop_token_ids": [1] * 2_000_000,
    "logit_bias": {str(token): 1 for token in range(49_000)},
}


@pytest.mark.attack(
    "fields of 0.6 to 20 MB with n = 128", "400 or 413 names the limit; others go on"
)
def test_a_large_field_is_refused(deployment: Cluster, outcome: Callable[[str], None]) -> None:
    gaps, growths = [], []
    for field, value in TOO_LARGE.items():
        status, error, seen = attack(deployment, chat_body(n=128, **{field: value}))
        assert (status, error["param"]) in ((400, field), (413, None))
        assert "limit" in error["message"]
        gaps.append(seen.longest_gap_s)
        growths.append(seen.worst_growth_mb)
    outcome(f"refused; + {max(growths):.0f} MB, longest gap {max(gaps):.2f} s")


@pytest.mark.attack("every field at its limit with n = 128", "answered; others go on")
def test_fields_at_their_limits_are_answered(
    deployment: Cluster, outcome: Callable[[str], None]
) -> None:
    status, error, seen = attack(deployment, chat_body(n=128, **AT_LIMITS))
    assert status == 200, error
    outcome(describe(status, seen))


@pytest.mark.attack("8 prompts that fill the context, with n = 128", "answered; others go on")
def test_long_prompts_of_many_choices_are_answered(
    deployment: Cluster, outcome: Callable[[str], None]
) -> None:
    prompts = [[300 + number] * 8000 for number in range(8)]
    status, error, seen = attack(deployment, completion_body(prompts, n=128), COMPLETIONS)
    assert status == 200, error
    outcome(describe(status, seen))


@pytest.mark.attack("256 prompts, each with fields at their limits", "answered; others go on")
def test_many_prompts_with_large_fields_are_answered(
    deployment: Cluster, outcome: Callable[[str], None]
) -> None:
    prompts = [[300 + number] for number in range(256)]
    body = completion_body(prompts, **AT_LIMITS)
    status, error, seen = attack(deployment, body, COMPLETIONS)
    assert status == 200, error
    outcome(describe(status, seen))


@pytest.mark.attack(
    "a request whose prompts, fields or echoes exceed its budget", "413 before workers get it all"
)
def test_a_request_over_its_budget_is_refused(
    deployment: Cluster, outcome: Callable[[str], None]
) -> None:
    echo = completion_body([[300] * 8000] * 8, n=128, echo=True)
    entries = completion_body([[300]] * 2048, **AT_LIMITS)
    for body in (echo, entries):
        status, error, seen = attack(deployment, body, COMPLETIONS)
        assert (status, error["code"], error["param"]) == (413, "request_too_large", "prompt")
        assert "limit" in error["message"]
    outcome(describe(status, seen))
