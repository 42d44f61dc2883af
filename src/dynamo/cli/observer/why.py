"""`dynamo why`: tell where the time of a request went, and because of what."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from dynamo.cli.parsing import Parser, check_writable, format_table, write_file
from dynamo.cli.router import add_router_flags, make_router_client
from dynamo.core.errors import InvalidRequest
from dynamo.core.settings.units import parse_seconds
from dynamo.operations.observer.causes import ADVICE

EXAMPLES = """\
  dynamo why                                     what made requests slow in the last hour
  dynamo why 1f0c2a9d5e6b7c8d00000001            by the answer's x-request-id, or a trace id
  dynamo why --slow 2s --worker worker-2         requests of 2 s and more at a worker
  dynamo why --failed --json
  dynamo why my-own-id --perfetto story.json     a timeline for ui.perfetto.dev"""

BAR_WIDTH = 40
Story = Mapping[str, Any]


def parser() -> Parser:
    """Return the parser: the request, or which ones, and the deployment."""
    parser = Parser(
        "dynamo why",
        "Tell where the time of a request went: its stages, its workers and the cause, in words.\n"
        "Without a request: the slow and failed ones of the last hour, grouped by cause.",
        EXAMPLES,
    )
    parser.add_argument("request", nargs="?", default="", help="request id or trace id")
    parser.add_argument("--slow", metavar="TIME", help="list requests that took so long, as 2s")
    parser.add_argument("--failed", action="store_true", help="list requests that failed")
    parser.add_argument("--worker", metavar="NAME", help="list requests of this worker")
    parser.add_argument("--since", metavar="TIME", default="1h", help="group the last 1h, 10m, ...")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.add_argument("--perfetto", metavar="FILE", help="write the timeline of the requests")
    add_router_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Fetch and print stories."""
    args = parser().parse(arguments)
    check_writable(args.perfetto)
    client, stories = make_router_client(args), []
    if args.request:
        stories = client.find_stories(args.request)
    elif args.slow or args.failed or args.worker:
        wanted: dict[str, Any] = {"slow": _read_time(args.slow, "slow") if args.slow else 0.0}
        if args.failed:
            wanted["failed"] = 1
        if args.worker:
            wanted["worker"] = args.worker
        stories = client.list_stories(**wanted)
    else:
        groups = client.group_causes(_read_time(args.since, "since"))
        stories = [group["worst"] for group in groups]
        if not args.perfetto:
            print(_to_json(groups) if args.json else format_groups(groups, args.since))
            return 0
    if args.perfetto:
        write_file(args.perfetto, msgspec.json.encode(make_perfetto(stories)))
        print(f"wrote {args.perfetto}")
    elif args.json:
        print(_to_json(stories))
    elif args.request:
        print("\n\n".join(map(format_story, stories)))
    else:
        print(format_list(stories) if stories else _describe_none(args))
    return 0


def _read_time(text: str, flag: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise InvalidRequest(f"--{flag}: {error}", hint="such as 2s, 500ms or 10m") from None


def _describe_none(args: argparse.Namespace) -> str:
    """Say which requests there are none of."""
    wanted = [f"took {args.slow} or longer"] if args.slow else []
    wanted += ["failed"] if args.failed else []
    wanted += [f"was at worker {args.worker}; `dynamo ps` lists workers"] if args.worker else []
    return f"of the requests that are kept, none {' and '.join(wanted)}"


def _to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def format_groups(groups: Sequence[Mapping[str, Any]], since: str) -> str:
    """Format the causes of late requests, the most expensive one first."""
    if not groups:
        return f"nothing took longer than usual in the last {since}"
    rows = [("REQUESTS", "COST", "CAUSE", "WORKERS", "WORST")]
    for group in groups:
        workers = [f"{name} ({count})" for name, count in group["workers"].items()]
        cost = f"{group['seconds']:.1f} s" if group["seconds"] else "-"
        count, worst = str(group["requests"]), group["worst"]
        rows.append((count, cost, group["cause"], ", ".join(workers[:3]), worst["client_id"]))
    worst = groups[0]["worst"]
    lines = [f"the worst of the first: {worst['verdict']}", *_format_advice(worst)]
    lines.append(f"its timeline: dynamo why {worst['client_id']}")
    return "\n".join([*format_table(rows), "", *lines])


def format_list(stories: Sequence[Story]) -> str:
    """Format each story as a line with its verdict."""
    rows = [("AT", "TOOK", "END", "REQUEST", "WHY")]
    for story in stories:
        end = story["end"] or "ok"
        at, took = _clock_time(story["at"]), _format_s(story["seconds"])
        rows.append((at, took, end, story["client_id"], story["verdict"]))
    return "\n".join(format_table(rows))


def format_story(story: Story) -> str:
    """Format a story with its verdict, its stages as a timeline, and its attempts."""
    own_id = f" ({story['request_id']})" if story["request_id"] != story["client_id"] else ""
    first = f", first text after {_format_s(story['ttft'])}" if story["ttft"] is not None else ""
    end = story["end"] or "ended well"
    took, gap = _format_s(story["seconds"]), _format_s(story["longest_gap"])
    prompt = f"{story['prompt_tokens']} of the prompt, {story['cached_tokens']} cached"
    lines = [
        f"request  {story['client_id']}{own_id}, {story['path']}, model {story['model'] or '-'}",
        f"at       {_clock_time(story['at'])} at {story['process']}, took {took}{first}, {end}",
        f"why      {story['verdict']}",
        *_format_advice(story),
        f"tokens   {prompt}, {story['output_tokens']} of the answer; longest gap {gap}",
    ]
    if story["missed"]:
        lines.append(f"missed   {story['missed']}")
    if story["trace_id"]:
        lines.append(f"trace    {story['trace_id']}")
    lines += ["", *_format_stages(story)]
    for number, attempt in enumerate(story["attempts"]):
        lines += ["", *_format_attempt(number, attempt)]
    return "\n".join(lines)


def _format_advice(story: Story) -> list[str]:
    """Return what to do about the first cause."""
    names = [each["name"].partition(":")[0] for each in story["causes"][:1]]
    return [f"do       {ADVICE[name]}" for name in names if name in ADVICE]


def _format_stages(story: Story) -> Iterator[str]:
    total = max(story["seconds"], 1e-9)
    rows = []
    for stage in story["stages"]:
        begin = min(BAR_WIDTH - 1, int(stage["at"] / total * BAR_WIDTH))
        width = max(1, round(stage["seconds"] / total * BAR_WIDTH))
        bar = (" " * begin + "#" * width)[:BAR_WIDTH]
        rows.append(
            (_format_s(stage["at"]), stage["stage"], _format_s(stage["seconds"]), bar,
             stage["worker"])
        )  # fmt: skip
    yield from format_table([("AT", "STAGE", "TOOK", "", "WORKER"), *rows])


def _format_attempt(number: int, attempt: Story) -> Iterator[str]:
    prefill = f", prompt by {attempt['prefill_worker']}" if attempt["prefill_worker"] else ""
    yield f"attempt {number + 1}: {attempt['worker']}{prefill}, from {_format_s(attempt['at'])}"
    predicted = attempt["predicted_ttft"]
    first = attempt["first_token"]
    if first is not None:
        after = _format_s(first - attempt["at"])
        guess = f", predicted {_format_s(predicted)}" if predicted is not None else ""
        yield f"  first token after {after}{guess}"
    times = attempt["times"]
    if times.get("ahead_requests") is not None:
        requests, tokens = times["ahead_requests"], times["ahead_tokens"]
        ahead = f"{requests} requests with {tokens} prompt tokens to compute"
        yield f"  behind {ahead if requests else 'no other request'}"
    if times.get("kv_from"):
        yield f"  waited {_format_s(times['kv_s'])} for KV from {times['kv_from']}"
    if times.get("kv_after_s"):
        yield f"  waited {_format_s(times['kv_after_s'])} for KV after its first token"
    if times.get("gap_s") is not None:
        yield f"  longest gap {_format_s(times['gap_s'])}"
    if times.get("preemptions"):
        tokens = times.get("recomputed_tokens")
        again = "" if tokens is None else f", {tokens} tokens were computed again"
        yield f"  preempted {times['preemptions']} times{again}"
    if not times:
        yield "  its engine does not tell its times"
    if attempt["resumed_tokens"]:
        yield f"  went on at token {attempt['resumed_tokens']} of the answer"
    if attempt["error"]:
        yield f"  ended with {attempt['error']}: {attempt['reason']}"


def make_perfetto(stories: Sequence[Story]) -> dict[str, Any]:
    """Return stories in the format of Chrome's traces, which ui.perfetto.dev opens: a process for
    each request, and a thread for the frontend and for each attempt."""
    events: list[dict[str, Any]] = []
    for pid, story in enumerate(stories, 1):
        name = f"{story['client_id']}: {story['verdict']}"
        events.append(_metadata("process_name", pid, 0, name))
        events.append(_metadata("thread_name", pid, 0, story["process"]))
        for number, attempt in enumerate(story["attempts"], 1):
            events.append(_metadata("thread_name", pid, number, attempt["worker"]))
        for stage in story["stages"]:
            thread = 0 if not stage["worker"] else stage["attempt"] + 1
            events.append(
                {
                    "ph": "X",
                    "name": stage["stage"],
                    "pid": pid,
                    "tid": thread,
                    "ts": (story["at"] + stage["at"]) * 1e6,
                    "dur": stage["seconds"] * 1e6,
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _clock_time(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _format_s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
