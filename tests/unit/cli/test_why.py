"""`dynamo why` prints the stories of an observer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.http_threads import serving
from tests.unit.observer.stories import make_attempt, make_story

from dynamo.cli.observer.why import format_groups, format_story, run
from dynamo.core.clock import SystemClock
from dynamo.core.errors import InvalidRequest
from dynamo.core.timing.worker_times import WorkerTimes
from dynamo.operations.observer.causes import ADVICE
from dynamo.operations.observer.observer import DeploymentObserver
from dynamo.telemetry.story import StoryBatch


def make_observer() -> DeploymentObserver:
    """Return an observer with 20 requests like others, and one that moved."""
    clock = SystemClock()
    observer, now = DeploymentObserver(clock), clock.wall()
    lost = make_attempt(
        worker="w2", first_us=None, ended_us=2_001_000, error="worker_failed", times=None,
        reason="the connection was lost",
    )  # fmt: skip
    again = make_attempt(
        choosing_us=2_051_000, placed_us=2_051_000, first_us=2_101_000, ended_us=2_201_000,
        resumed=3, predicted_us=40_000,
        times=WorkerTimes(queue_s=0.001, ahead_requests=2, ahead_tokens=900, kv_s=0.01,
                          kv_from="disk", prefill_s=0.03, decode_s=0.1, gap_s=0.01,
                          preemptions=1, recomputed_tokens=70),
    )  # fmt: skip
    stories = [make_story(request_id=f"r-{number}", wall_s=now) for number in range(20)]
    moved = make_story(
        lost, again, request_id="moved-1", client_id="moved", wall_s=now, ended_us=2_202_000
    )
    observer.on_batch(StoryBatch("frontend-1", now, [*stories, moved]))
    return observer


def as_sent(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def test_a_story_shows_verdict_stages_and_attempts() -> None:
    (story,) = as_sent(make_observer().find("moved"))
    shown = format_story(story)
    assert "request  moved (moved-1), /v1/chat/completions, model m" in shown
    assert "2 of 2.2 s were lost with w2 at token 3: the connection was lost" in shown
    assert "do       its last log lines tell how it died" in shown
    for line in (
        "its engine does not tell its times",
        "ended with worker_failed: the connection was lost",
        "went on at token 3 of the answer",
        "behind 2 requests with 900 prompt tokens to compute",
        "waited 10.0 ms for KV from disk",
        "longest gap 10.0 ms",
        "preempted 1 times, 70 tokens were computed again",
        "first token after 50.0 ms, predicted 40.0 ms",
    ):
        assert f"  {line}" in shown


def test_groups_are_a_table_with_the_worst_request() -> None:
    groups = as_sent(make_observer().group_causes())
    lines = format_groups(groups, "1h").splitlines()
    assert lines[1].split() == ["1", "2.0", "s", "lost", "worker", "w2", "(1)", "moved"]
    assert lines[-3].startswith("the worst of the first: 2 of 2.2 s were lost with w2")
    assert lines[-1] == "its timeline: dynamo why moved"
    assert format_groups([], "10m") == "nothing took longer than usual in the last 10m"


class ObserverHandler(BaseHTTPRequestHandler):
    """Answers as an observer; as a frontend, it names the observer."""

    observer: DeploymentObserver
    redirect = ""
    list_slow_s = 1.0
    paths: list[str]

    def do_GET(self) -> None:
        self.paths.append(self.path)
        if self.redirect:
            self.answer(307, {"location": f"{self.redirect}{self.path}"})
        elif self.path.startswith("/causes"):
            self.answer(200, {"causes": as_sent(self.observer.group_causes())})
        else:
            self.answer(
                200, {"requests": as_sent(self.observer.list_stories(slow=self.list_slow_s))}
            )

    def answer(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served() -> Iterator[tuple[str, list[str]]]:
    """The URL of a frontend that redirects to an observer, and the paths asked for."""
    paths: list[str] = []
    observer = make_observer()
    own = type("Own", (ObserverHandler,), {"observer": observer, "paths": paths})
    with serving(HTTPServer(("127.0.0.1", 0), own)) as behind:
        url = f"http://127.0.0.1:{behind.server_port}"
        front = type("Front", (ObserverHandler,), {"redirect": url, "paths": []})
        with serving(HTTPServer(("127.0.0.1", 0), front)) as server:
            yield f"http://127.0.0.1:{server.server_port}", paths


def test_a_frontend_names_its_observer(
    served: tuple[str, list[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url, paths = served
    assert run(["--slow", "1500ms", "--failed", "--worker", "w2", "--url", url]) == 0
    assert "moved" in capsys.readouterr().out
    assert run(["--url", url, "--since", "10m"]) == 0
    assert run(["moved", "--url", url, "--json"]) == 0
    assert paths == [
        "/requests?slow=1.5&failed=1&worker=w2",
        "/causes?seconds=600",
        "/requests/moved",
    ]
    file = tmp_path / "story.json"
    assert run(["moved", "--url", url, "--perfetto", str(file)]) == 0
    events = json.loads(file.read_bytes())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in spans} >= {"tokenise", "worker", "prefill", "decode"}
    assert sum(event["dur"] for event in spans) == pytest.approx(2_202_000)
    assert {event["tid"] for event in spans} == {0, 1, 2}


def test_each_cause_says_what_to_do_and_is_in_the_guide() -> None:
    guide = (Path(__file__).parents[3] / "docs/how-to/why.md").read_text()
    for name in ADVICE:
        assert f"`{name}`" in guide


def test_a_list_of_none_says_what_there_is_none_of(
    served: tuple[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, _ = served
    ObserverHandler.list_slow_s = 9.0
    assert run(["--slow", "9s", "--failed", "--worker", "w9", "--url", url]) == 0
    ObserverHandler.list_slow_s = 1.0
    expected = "none took 9s or longer and failed and was at worker w9; `dynamo ps` lists workers"
    assert expected in capsys.readouterr().out


def test_a_time_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="--slow"):
        run(["--slow", "long", "--url", "http://127.0.0.1:1"])
