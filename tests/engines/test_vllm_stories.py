"""Stories, spans and metrics of a vLLM worker equal vLLM's own statistics and spans of the same
requests."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from tests.conftest import Deployment, free_port, until
from tests.support.http_threads import serving

READY_S = 900.0
ARGUMENTS = ("dtype=float32", "enforce_eager=true", "block_size=32", "num_gpu_blocks_override=80")
BLOCK_TOKENS = 32 * (80 - 1)  # vLLM keeps a block for itself
QUEUED = 8
BATCHED_TOKENS = 128
"""A step computes so many tokens, so that prompts that come at once wait in vLLM's queue."""
TOLERANCE = 0.05
PARENT = "00f067aa0ba902b7"
PLUGIN = Path(__file__).parent.parent / "support" / "vllm_recorder.py"


class Collector(BaseHTTPRequestHandler):
    """Takes spans of ours and of vLLM as OTLP over HTTP."""

    bodies: list[bytes]

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def bodies() -> list[bytes]:
    """The messages that the collector has received."""
    return []


def install_recorder(folder: Path) -> dict[str, str]:
    """Return the variables with which vLLM has the plugin: it is found by its entry point."""
    shutil.copy(PLUGIN, folder)
    information = folder / "vllm_recorder-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm_recorder\nVersion: 1\n"
    )
    entry = "[vllm.stat_logger_plugins]\nrecorder = vllm_recorder:Recorder\n"
    (information / "entry_points.txt").write_text(entry)
    return {
        "PYTHONPATH": str(folder),
        "TEST_VLLM_PORT": str(free_port()),
        "TEST_VLLM_REQUESTS": str(folder / "requests.jsonl"),
    }


@pytest.fixture(scope="module")
def environ(
    tmp_path_factory: pytest.TempPathFactory, runtime_environ: dict[str, str], bodies: list[bytes]
) -> Iterator[dict[str, str]]:
    handler = type("Handler", (Collector,), {"bodies": bodies})
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        yield {
            **runtime_environ,
            **install_recorder(tmp_path_factory.mktemp("plugin")),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": "0.5",
        }


@pytest.fixture(scope="module")
def deployment(
    engine_model: Path, tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]
) -> Iterator[Deployment]:
    traces = f"otlp_traces_endpoint={environ['OTEL_EXPORTER_OTLP_ENDPOINT']}/v1/traces"
    words = [word for argument in (*ARGUMENTS, traces) for word in ("--engine-arg", argument)]
    words += [
        "out=vllm",
        str(engine_model),
        "--router-mode",
        "round_robin",
        "--max-model-len",
        "2048",
    ]
    words += ["--max-num-seqs", str(QUEUED), "--max-num-batched-tokens", str(BATCHED_TOKENS)]
    words += ["--observer", "--max-queue-wait", "3600"]
    deployment = Deployment(words, tmp_path_factory.mktemp("vllm"), environ)
    try:
        deployment.wait_ready(READY_S)
        yield deployment
    finally:
        deployment.stop(timeout_s=60)


def complete(deployment: Deployment, tokens: list[int], length: int, trace: str = "") -> str:
    """Return the request id of a completion."""
    body = {"model": "default", "prompt": tokens, "max_tokens": length, "ignore_eos": True}
    headers = {"content-type": "application/json"} | ({"traceparent": trace} if trace else {})
    request = urllib.request.Request(
        f"{deployment.url}/v1/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=READY_S) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == length
        return str(answer.headers["x-request-id"])


def complete_all(deployment: Deployment, *requests: tuple[list[int], int]) -> list[str]:
    """Return the ids of completions that are sent at once."""
    with ThreadPoolExecutor(len(requests)) as threads:
        sent = [threads.submit(complete, deployment, *request) for request in requests]
        return [each.result() for each in sent]


def prompt(length: int, begin: int) -> list[int]:
    return [begin + number % 1_000 for number in range(length)]


def run_dynamo(deployment: Deployment, *words: str) -> str:
    command = [sys.executable, "-m", "dynamo", *words, "--deployment", str(deployment.port)]
    return subprocess.run(
        command, capture_output=True, check=True, text=True, env=deployment.environ
    ).stdout


def read_stories(deployment: Deployment, ids: list[str]) -> dict[str, Any]:
    """Return the stories of requests, which the observer has within a second."""

    def read() -> dict[str, Any]:
        rows = json.loads(run_dynamo(deployment, "why", "--slow", "1ms", "--json"))
        stories = {row["client_id"]: row for row in rows}
        return stories if stories.keys() >= {*ids} else {}

    return until(read, READY_S)


@pytest.fixture(scope="module")
def requests(deployment: Deployment) -> list[str]:
    """Ids of requests of several lengths: alone, with cached prefixes, and queued behind others."""
    ids = [complete(deployment, prompt(length, 300), 8) for length in (20, 100, 500, 1_500)]
    ids += [complete(deployment, prompt(length, 300), 8) for length in (520, 1_000, 1_500)]
    lengths = range(100, 100 + 100 * QUEUED, 100)
    return ids + complete_all(deployment, *((prompt(each, 2_000 + each), 48) for each in lengths))


def read_statistics(environ: dict[str, str]) -> dict[str, Any]:
    """Return vLLM's `FinishedRequestStats` by request id."""
    lines = Path(environ["TEST_VLLM_REQUESTS"]).read_text().splitlines()
    return {row["request_id"].rpartition("/")[0]: row for row in map(json.loads, lines)}


def sum_stages(story: Any) -> dict[str, float]:
    sums = defaultdict[str, float](float)
    for stage in story["stages"]:
        sums[stage["stage"]] += stage["seconds"]
    return sums


def test_stories_tell_the_times_of_vllms_statistics(
    deployment: Deployment, environ: dict[str, str], requests: list[str]
) -> None:
    stories, statistics = read_stories(deployment, requests), read_statistics(environ)
    for request in requests:
        story = stories[request]
        stages, (attempt,) = sum_stages(story), story["attempts"]
        row = statistics[story["request_id"]]
        assert stages["queue"] == pytest.approx(row["queued_time"], TOLERANCE, abs=2e-6)
        assert stages["prefill"] == pytest.approx(row["prefill_time"], TOLERANCE)
        assert attempt["times"]["decode_s"] == pytest.approx(row["decode_time"], TOLERANCE)
        assert sum(stages.values()) == pytest.approx(story["seconds"], abs=1e-3)
        assert story["seconds"] >= row["e2e_latency"]
        assert story["cached_tokens"] == attempt["cached_tokens"] == row["num_cached_tokens"]
        assert attempt["prompt_tokens"] == row["num_prompt_tokens"]
        assert attempt["times"]["preemptions"] == row["num_preemptions"]
    assert [stories[request]["cached_tokens"] for request in requests[:7]] == [
        *(0, 0, 96, 480),
        *(512, 992, 1_472),
    ]
    burst = [sum_stages(stories[request]) for request in requests[-QUEUED:]]
    longest_s = max(stages["queue"] for stages in burst)
    assert longest_s > min(stages["prefill"] for stages in burst), "no request waited in vLLM"


def test_why_says_that_a_request_waited_in_vllms_queue(
    deployment: Deployment, requests: list[str], tmp_path: Path
) -> None:
    stories = read_stories(deployment, requests)
    last = max(requests, key=lambda request: sum_stages(stories[request])["queue"])
    story = stories[last]
    assert ("overload", "queue") in [(each["name"], each["stage"]) for each in story["causes"]]
    shown_story = run_dynamo(deployment, "why", last)
    assert re.search(r"waited at worker-\w+ behind [1-7] requests with \d+ prompt", shown_story)
    timeline = tmp_path / "timeline.json"
    run_dynamo(deployment, "why", last, "--perfetto", str(timeline))
    events = json.loads(timeline.read_text())["traceEvents"]
    shown = {event["name"]: event["dur"] for event in events if event["ph"] == "X"}
    assert shown["queue"] == pytest.approx(sum_stages(story)["queue"] * 1e6)
    assert {"prefill", "decode"} <= shown.keys()


def read_spans(bodies: list[bytes]) -> list[Any]:
    messages = map(ExportTraceServiceRequest.FromString, [*bodies])
    resources = [each for message in messages for each in message.resource_spans]
    return [span for each in resources for scope in each.scope_spans for span in scope.spans]


def test_vllms_span_is_below_our_attempt(deployment: Deployment, bodies: list[bytes]) -> None:
    wanted, forbidden, last = "a" * 32, "b" * 32, "c" * 32
    for number in range(8):  # half of them are chosen, and vLLM has spans of no others
        complete(deployment, prompt(40, 9_000 + number), 2)
    complete(deployment, prompt(400, 9_300), 8, f"00-{wanted}-{PARENT}-01")
    complete(deployment, prompt(40, 9_400), 2, f"00-{forbidden}-{PARENT}-00")
    complete(deployment, prompt(40, 9_500), 2, f"00-{last}-{PARENT}-01")

    def read_vllms() -> dict[str, Any]:
        """Return vLLM's spans by trace if the one of the last request is there."""
        spans = [span for span in read_spans(bodies) if span.name == "llm_request"]
        traces = {span.trace_id.hex(): span for span in spans}
        assert len(traces) == len(spans)
        return traces if last in traces else {}

    theirs = until(read_vllms, READY_S)

    def read_ours() -> dict[tuple[str, bytes], Any]:
        """Return our spans if those of the same requests are there."""
        spans = [span for span in read_spans(bodies) if span.name != "llm_request"]
        roots = {span.trace_id.hex() for span in spans if span.name.startswith("text_completion")}
        return (
            {(span.trace_id.hex(), span.span_id): span for span in spans}
            if roots >= {*theirs}
            else {}
        )

    ours = until(read_ours, READY_S)
    assert forbidden not in theirs
    assert {wanted, last} < theirs.keys()
    for trace, span in theirs.items():
        attempt = ours[trace, span.parent_span_id]
        assert attempt.name == "generate worker"
        facts = {each.key: each.value.double_value for each in span.attributes}
        stages = {
            each.name: each for each in ours.values() if each.parent_span_id == attempt.span_id
        }
        for stage, name in (("queue", "time_in_queue"), ("prefill", "time_in_model_prefill")):
            shown = stages[stage]
            took_s = (shown.end_time_unix_nano - shown.start_time_unix_nano) * 1e-9
            assert took_s == pytest.approx(facts[f"gen_ai.latency.{name}"], TOLERANCE, abs=2e-6)
    root = ours[wanted, ours[wanted, theirs[wanted].parent_span_id].parent_span_id]
    assert root.parent_span_id.hex() == PARENT


def test_a_preempted_request_says_so(deployment: Deployment, environ: dict[str, str]) -> None:
    """Two prompts fill the blocks, which their answers need, too."""
    ids = complete_all(deployment, (prompt(1_200, 20_000), 64), (prompt(1_200, 21_000), 64))
    stories, statistics = read_stories(deployment, ids), read_statistics(environ)
    counts = {}
    for request in ids:
        (attempt,) = stories[request]["attempts"]
        counts[request] = attempt["times"]["preemptions"]
        assert counts[request] == statistics[stories[request]["request_id"]]["num_preemptions"]
    (preempted,) = (request for request in ids if counts[request])
    assert "  preempted 1 times\n" in run_dynamo(deployment, "why", preempted) + "\n"


def read_metrics(url: str) -> dict[str, Any]:
    """Return the metrics under vLLM's names."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=READY_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {family.name: family for family in families if family.name.startswith("vllm:")}


def sample(family: Any, suffix: str = "") -> float:
    (value,) = (each.value for each in family.samples if each.name == family.name + suffix)
    return float(value)


def bounds(family: Any) -> list[str]:
    return [each.labels["le"] for each in family.samples if "le" in each.labels]


def test_metrics_under_vllms_names_have_vllms_values(
    deployment: Deployment, environ: dict[str, str]
) -> None:
    (worker,) = (each for each in deployment.processes() if each["role"] == "worker")

    def read() -> Any:
        """Return both sides when no probe is between."""
        ours = read_metrics(worker["status_url"])
        theirs = read_metrics(f"http://127.0.0.1:{environ['TEST_VLLM_PORT']}")
        counted = [name for name, family in ours.items() if family.type in ("counter", "gauge")]
        counted.remove("vllm:cache_config_info")
        suffixes = {"counter": "_total", "gauge": ""}
        are_equal = all(
            sample(ours[name], suffixes[ours[name].type])
            == sample(theirs[name], suffixes[ours[name].type])
            for name in counted
        )
        return are_equal and (ours, theirs)

    ours, theirs = until(read, READY_S)
    assert {name: family.type for name, family in ours.items()} == {
        name: theirs[name].type for name in ours
    }
    assert sample(ours["vllm:num_preemptions"], "_total") == 1
    assert sample(ours["vllm:prefix_cache_hits"], "_total") >= 3_552
    for family in (ours, theirs):
        labels = family["vllm:cache_config_info"].samples[0].labels
        blocks = int(labels["num_gpu_blocks"]) - (family is theirs)
        assert int(labels["block_size"]) * blocks == BLOCK_TOKENS
    rows = read_statistics(environ).items()
    probes = [row for name, row in rows if name == "probe"]
    requests = [row for name, row in rows if name != "probe"]
    assert len(probes) <= 1
    for name, column in (
        ("request_queue_time", "queued_time"),
        ("request_prefill_time", "prefill_time"),
        ("request_decode_time", "decode_time"),
        ("e2e_request_latency", "e2e_latency"),
    ):
        family = ours[f"vllm:{name}_seconds"]
        assert bounds(family) == bounds(theirs[f"vllm:{name}_seconds"])
        assert sample(family, "_count") == len(requests)
        expected = sum(row[column] for row in requests)
        assert sample(family, "_sum") == pytest.approx(expected, TOLERANCE)
    between = "vllm:inter_token_latency_seconds"
    for suffix in ("_count", "_sum"):
        expected = sample(theirs[between], suffix)
        assert sample(ours[between], suffix) == pytest.approx(expected, TOLERANCE)
