#!/usr/bin/env python3
"""Measure structured output and forced calls over HTTP, with the default model.

    benchmarks/structured_output_http.py [--parts ttft,hostile,killed,calls] [--prompts 100]

- ttft: what a structured output adds to the time of the first token with the mock engine, one request at a time. A new
  one is tried and compiled; then the same comes once more.
- hostile: gaps between the tokens of eight streams, with and without 64 hostile ones at once.
- killed: 20 schemas x 10 seeds at temperature 1 on two workers, of which one is killed in the middle.
- calls: prompts x 3 surfaces x whole and streamed, half of them `required` and half a named function.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from servers import Server, start_ours
from structured_output import is_valid, make_schema
from tool_formats import APIS

STREAMS, STREAM_TOKENS = 8, 96
AT_ONCE = 16
FORMS = 300
HOSTILE = 64
HOSTILE_ROUNDS = 2


def post(url: str, body: dict[str, Any]) -> Any:
    """Return the open answer to a chat request."""
    fields = {"model": "default", **body}
    return urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(fields).encode())
    )


def chat(text: str, schema: Any = None, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], **fields}
    if schema is not None:
        named = {"name": "answer", "schema": schema}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    return body


def serve(workers: int, engine: str = "native") -> Server:
    return start_ours("", workers, 1_000_000, "round_robin", engine=engine, timeout_s=180)


def p99(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3


def measure_ttft(server: Server, _prompts: int) -> None:
    kinds: dict[str, list[float]] = {"free": [], "new schema": [], "known schema": []}
    for number in range(-5, FORMS):
        schema = make_schema(number + 5)
        schema["properties"][f"key{number}"] = {"type": "boolean"}
        for kind, form in (("free", None), ("new schema", schema), ("known schema", schema)):
            started = time.perf_counter()
            post(server.url, chat(f"Number {number}.", form, max_tokens=1)).read()
            if number >= 0:
                kinds[kind].append(time.perf_counter() - started)
    for kind, times in kinds.items():
        added = p99(times) - p99(kinds["free"])
        middle = statistics.median(times) * 1e3
        print(f"ttft, {kind}: median {middle:.1f} ms, p99 {p99(times):.1f} ms, {added:+.1f} ms")


def hostile_form(number: int) -> dict[str, Any]:
    """Return the fields of a schema that is small and takes too long."""
    if number % 2:
        size = 1000 + number
        return {"guided_regex": f"(x{{{size}}}){{{size}}}"}
    names = (f"p{number}_{index}" for index in range(1900))
    properties = {name: {"type": "integer"} for name in names}
    return {"guided_json": {"type": "object", "properties": properties}}


def stream_times(url: str, number: int) -> list[float]:
    """Return when the tokens of one stream came."""
    body = chat(f"Tell story {number}.", stream=True, max_tokens=STREAM_TOKENS, ignore_eos=True)
    return [time.perf_counter() for line in post(url, body) if line.startswith(b'data: {"id"')]


def send_hostile(url: str, number: int) -> str:
    try:
        post(url, chat("Hi", max_tokens=4, **hostile_form(number))).read()
    except urllib.error.HTTPError as error:
        return str(json.load(error)["error"]["code"])
    return "answered"


def measure_hostile(server: Server, _prompts: int) -> None:
    gaps: dict[bool, list[float]] = {False: [], True: []}
    codes: dict[str, int] = {}
    with ThreadPoolExecutor(STREAMS + HOSTILE) as pool:
        for round_number, attack in enumerate((False, True, True, False) * HOSTILE_ROUNDS):
            streams = [pool.submit(stream_times, server.url, number) for number in range(STREAMS)]
            time.sleep(2)  # until all prompts are computed
            began = time.perf_counter()
            start = HOSTILE * round_number  # each round has schemas of its own
            numbers = range(start, start + HOSTILE) if attack else ()
            attacks = [pool.submit(send_hostile, server.url, number) for number in numbers]
            for stream in streams:
                times = [at for at in stream.result() if at >= began]
                gaps[attack] += [after - before for before, after in itertools.pairwise(times)]
            for sent in attacks:
                codes[sent.result()] = codes.get(sent.result(), 0) + 1
            if attack:
                print(f"hostile: answered after {time.perf_counter() - began:.1f} s", flush=True)
    for attack, values in gaps.items():
        middle = statistics.median(values) * 1e3
        name = f"{HOSTILE} hostile schemas" if attack else "none"
        print(f"hostile: {name}: gaps median {middle:.1f} ms, p99 {p99(values):.1f} ms")
    print(f"hostile: answers {codes}, p99 {p99(gaps[True]) - p99(gaps[False]):+.1f} ms")


def is_right(schema: Any, text: str | None) -> bool:
    try:
        return is_valid(schema, json.loads(text or ""))
    except ValueError:
        return False


def run_all(jobs: Sequence[Callable[[], bool]]) -> int:
    """Run jobs at once and return how many are right."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return sum(pool.map(lambda job: job(), jobs))


def measure_killed(server: Server, _prompts: int) -> None:
    answered: list[str] = []

    def ask(number: int) -> bool:
        schema = make_schema(number // 10)
        body = chat("Describe something as JSON.", schema, temperature=1, seed=number % 10)
        choice = json.load(post(server.url, body | {"max_tokens": 600}))["choices"][0]
        answered.append(choice["finish_reason"])
        if len(answered) == 60:
            os.kill(server.workers[0], signal.SIGKILL)
        right = choice["finish_reason"] == "stop" and is_right(schema, choice["message"]["content"])
        if not right:
            print("wrong:", choice["finish_reason"], choice["message"]["content"])
        return right

    right = run_all([lambda number=number: ask(number) for number in range(200)])
    print(f"killed: {right} of 200 parse, are valid and end by stop")


def measure_calls(server: Server, prompts: int) -> None:
    functions = [
        {"name": f"tool_{number}", "parameters": make_schema(number)} for number in range(4)
    ]
    tools = [{"type": "function", "function": function} for function in functions]

    def ask(number: int, surface: str, stream: bool) -> bool:
        named = {"type": "function", "function": {"name": f"tool_{number % 4}"}}
        body = chat(f"Use a tool for task {number}, please.", temperature=1, max_tokens=800)
        body |= {"model": "default", "tools": tools, "seed": number}
        body["tool_choice"] = named if number % 2 else "required"
        calls = APIS[surface].ask(server.url, body, stream=stream).calls
        right = bool(calls) and all(
            is_right(make_schema(int(name.removeprefix("tool_"))), arguments)
            and (not number % 2 or name == f"tool_{number % 4}")
            for name, arguments in calls
        )
        if not right:
            print("wrong:", surface, stream, calls)
        return right

    for surface in APIS:
        for stream in (False, True):
            jobs = [lambda n=n, s=surface, e=stream: ask(n, s, e) for n in range(prompts)]
            started = time.perf_counter()
            right = run_all(jobs)
            form = "streamed" if stream else "whole"
            seconds = time.perf_counter() - started
            print(f"calls: {surface}, {form}: {right} of {prompts}, {seconds:.0f} s", flush=True)


PARTS: dict[str, tuple[Callable[[Server, int], None], int, str]] = {
    "ttft": (measure_ttft, 1, "mock"),
    "hostile": (measure_hostile, 1, "native"),
    "killed": (measure_killed, 2, "native"),
    "calls": (measure_calls, 1, "native"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--prompts", type=int, default=100, help="of the part calls")
    args = parser.parse_args()
    for name in args.parts.split(","):
        measure, workers, engine = PARTS[name]
        server = serve(workers, engine)
        try:
            measure(server, args.prompts)
        finally:
            server.stop()


if __name__ == "__main__":
    main()
