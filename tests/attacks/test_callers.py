"""Clients with keys of their own share a deployment, and one wants to know or have more."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.attacks.client import HttpAnswer, exchange, request_bytes
from tests.faults.cluster import Cluster
from tests.faults.stream_client import body_of

KEYS = ("the-key-of-alice", "the-key-of-bob")
GREEDY = 8
GREEDY_S = 10.0


@pytest.fixture(scope="module")
def shared(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A deployment with two keys and one worker of two places."""
    flags = ("--server.api_keys", ",".join(KEYS), "--max-num-seqs", "2")
    folder = tmp_path_factory.mktemp("shared")
    with Cluster(tiny_model, folder, workers=1, flags=flags) as cluster:
        yield cluster


def ask(
    cluster: Cluster, key: str, tokens: int = 2, words: int = 100, **fields: object
) -> HttpAnswer:
    body = body_of(3, tokens, words) | {"stream": False, "stream_options": None} | fields
    request = request_bytes(body, headers=(f"Authorization: Bearer {key}",))
    return exchange(cluster.port, request, 60)


def cached_tokens(answer: HttpAnswer) -> int:
    assert answer.status == 200, answer
    return int(json.loads(answer.body)["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.attack(
    "a client sends another client's prompt to learn from cached_tokens whether it was asked",
    "cached tokens are those of the own key only, whatever cache_salt says",
)
def test_cached_tokens_tell_of_the_own_key_only(
    shared: Cluster, outcome: Callable[[str], None]
) -> None:
    alice, bob = KEYS
    assert cached_tokens(ask(shared, alice)) == 0
    own = cached_tokens(ask(shared, alice))
    assert own > 100
    for salt in ("", alice, bob):
        assert cached_tokens(ask(shared, bob, cache_salt=salt)) == 0
    assert cached_tokens(ask(shared, bob)) == own
    outcome(f"the owner reads {own} cached tokens, a stranger 0")


@pytest.mark.attack(
    f"{GREEDY} requests of priority 2^31 at a time keep a worker of two places busy",
    "the other client's requests take their turn",
)
def test_a_high_priority_starves_nobody(shared: Cluster, outcome: Callable[[str], None]) -> None:
    alice, bob = KEYS
    stopping = threading.Event()
    statuses: list[int] = []

    def request_greedily() -> None:
        while not stopping.is_set():
            answer = ask(shared, bob, 20, 4, priority=1 << 31, ignore_eos=True)
            statuses.append(answer.status)

    greedy = [threading.Thread(target=request_greedily) for _ in range(GREEDY)]
    for thread in greedy:
        thread.start()
    time.sleep(1)
    timer = threading.Timer(GREEDY_S, stopping.set)
    timer.start()
    answers = [ask(shared, alice, 4, 4) for _ in range(2)]
    starved = stopping.is_set()
    stopping.set()
    timer.cancel()
    for thread in greedy:
        thread.join()
    assert [answer.status for answer in answers] == [200, 200]
    assert not starved
    assert set(statuses) == {200}
    outcome(f"served after {max(answer.seconds for answer in answers):.1f} s")
