#!/usr/bin/env python3
"""Count the recorded outputs whose reasoning, text and tool calls clients get right, over HTTP.

    benchmarks/tool_formats.py FOLDER [--family NAME ...] [--groupings 8] [--api NAME]

FOLDER holds families (`NAME/family.json`, `NAME/outputs.jsonl`) as `tests/data/toolcalls` does. Each
family is served by `dynamo run out=script`. Every output is asked for as a whole and as a stream in
groupings of tokens. Prints for each family how many outputs are right in all of them: to the letter,
and but for white space at the ends of texts. Wrong ones are listed. Truncated outputs are judged as
whole answers only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.conftest import free_port
from tests.support.recorded_outputs import (
    FamilyFile,
    ParsedAnswer,
    RecordedOutput,
    judge,
    read_collection,
)

from dynamo.testing.family import write_family_folder

READY_S = 120


class Api(NamedTuple):
    """A surface: its path, the body of a chat request there, and the readers of its answers."""

    path: str
    make_body: Callable[[dict[str, Any]], dict[str, Any]]
    read_whole: Callable[[Any], ParsedAnswer]
    read_stream: Callable[[Iterable[bytes]], ParsedAnswer]

    def ask(self, url: str, chat: dict[str, Any], *, stream: bool) -> ParsedAnswer:
        """Send a chat request in the form of this surface and return its answer."""
        body = self.make_body(chat | ({"stream": True} if stream else {}))
        request = urllib.request.Request(f"{url}{self.path}", json.dumps(body).encode())
        try:
            with closing(urllib.request.urlopen(request)) as answer:
                return self.read_stream(answer) if stream else self.read_whole(json.load(answer))
        except urllib.error.HTTPError as error:
            raise SystemExit(error.read().decode()) from None


def main() -> int:
    """Serve each family and print the counts. Returns 1 if an output is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", action="append", help="only this family")
    parser.add_argument("--groupings", type=int, default=8, help="streams of each output")
    parser.add_argument("--api", choices=APIS, default="chat")
    options = parser.parse_args()
    total: Counter[str] = Counter()
    for family, outputs in read_collection(options.folder):
        if not options.family or family.slug in options.family:
            counts = measure(family, outputs, options.groupings, APIS[options.api])
            print(f"{family.slug}: {describe(counts)}", flush=True)
            total += counts
    print(f"all: {describe(total)}")
    return 1 if total["wrong"] else 0


def describe(counts: Counter[str]) -> str:
    """Return the counts in words."""
    right = counts["exact"] + counts["soft"]
    return f"{counts.total()} outputs, {right} right, {counts['exact']} to the letter"


def measure(
    family: FamilyFile,
    outputs: list[RecordedOutput],
    groupings: int,
    api: Api,
) -> Counter[str]:
    """Serve a family, one deployment for tokens alone and one for groups of tokens."""
    verdicts: dict[str, set[str]] = {output.id: set() for output in outputs}
    with tempfile.TemporaryDirectory() as folder:
        model, script = Path(folder) / family.slug, Path(folder) / "script.jsonl"
        write_family_folder(family.markers, model)
        lines = (
            {"when": f"[{output.id}]", "text": output.raw_output}
            | ({"cut": 1 << 20} if output.truncated else {})
            for output in outputs
        )
        script.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for tokens, seeds in (("1", range(1)), ("1-8", range(1, groupings))):
            port = free_port()
            command = [
                *(sys.executable, "-m", "dynamo", "run", "out=script", str(model)),
                *("--script", str(script), "--tool-format", family.slug),
                *("--tokens-per-step", tokens, "--http-port", str(port)),
            ]
            server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                url = f"http://127.0.0.1:{port}"
                wait_until_ready(url)
                for output in outputs:
                    for seed in seeds:
                        for stream in (False,) if output.truncated else (False, True):
                            answer = api.ask(url, chat_body(output, seed), stream=stream)
                            verdicts[output.id].add(judge(output, answer))
            finally:
                server.terminate()
                server.wait(60)
    worst = {
        name: next(verdict for verdict in ("wrong", "soft", "exact") if verdict in answers)
        for name, answers in verdicts.items()
    }
    for name, verdict in worst.items():
        if verdict != "exact":
            print(f"  {verdict}: {name}")
    return Counter(worst.values())


def wait_until_ready(url: str) -> None:
    """Wait until the server has its model."""
    for _ in range(READY_S * 10):
        with suppress(OSError), closing(urllib.request.urlopen(f"{url}/v1/models")) as answer:
            if json.load(answer)["data"]:
                return
        time.sleep(0.1)
    raise SystemExit("the server was not ready")


def chat_body(output: RecordedOutput, seed: int) -> dict[str, Any]:
    """Return the chat request for an output; `seed` draws its grouping."""
    return {
        "model": "default",
        "messages": [{"role": "user", "content": f"[{output.id}]"}],
        "tools": output.tools,
        "seed": seed,
        "max_tokens": 4096,
        "chat_template_kwargs": {"generation_prompt": output.generation_prompt or ""},
    }


def read_chat(answer: Any) -> ParsedAnswer:
    message = answer["choices"][0]["message"]
    functions = [call["function"] for call in message.get("tool_calls", [])]
    calls = [(function["name"], function["arguments"]) for function in functions]
    return ParsedAnswer(message["content"], message.get("reasoning_content"), calls)


def read_chat_stream(lines: Iterable[bytes]) -> ParsedAnswer:
    texts: dict[str, str] = {"content": "", "reasoning_content": ""}
    calls: dict[int, tuple[str, str]] = {}
    for event in read_events(lines):
        delta = event["choices"][0]["delta"]
        for key in texts:
            texts[key] += delta.get(key) or ""
        for call in delta.get("tool_calls", []):
            name, arguments = calls.get(call["index"], ("", ""))
            function = call["function"]
            name = function.get("name", name)
            calls[call["index"]] = (name, arguments + function["arguments"])
    return ParsedAnswer(texts["content"], texts["reasoning_content"], list(calls.values()))


def read_events(lines: Iterable[bytes]) -> Iterable[Any]:
    """Yield the events of a stream."""
    return (json.loads(line[6:]) for line in lines if line.startswith(b"data: {"))


def responses_body(chat: dict[str, Any]) -> dict[str, Any]:
    (message,) = chat["messages"]
    own = {
        "input": message["content"],
        "tools": [{"type": "function", **tool["function"]} for tool in chat["tools"]],
        "max_output_tokens": chat["max_tokens"],
        "store": False,
    }
    choice = chat.get("tool_choice")
    if isinstance(choice, dict):
        own["tool_choice"] = {"type": "function", **choice["function"]}
    others = {key: chat[key] for key in chat.keys() - {"messages", "max_tokens"}}
    return others | own


def read_response(answer: Any) -> ParsedAnswer:
    items = answer["output"]
    texts: dict[str, str] = {"message": "", "reasoning": ""}
    for item in items:
        if item["type"] in texts:
            texts[item["type"]] += "".join(part["text"] for part in item["content"])
    calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    return ParsedAnswer(texts["message"] or None, texts["reasoning"] or None, calls)


def read_response_stream(lines: Iterable[bytes]) -> ParsedAnswer:
    texts = {"response.output_text.delta": "", "response.reasoning_text.delta": ""}
    calls: dict[int, tuple[str, str]] = {}
    for event in read_events(lines):
        kind, index = event["type"], event.get("output_index")
        if kind in texts:
            texts[kind] += event["delta"]
        elif kind == "response.output_item.added" and event["item"]["type"] == "function_call":
            calls[index] = (event["item"]["name"], "")
        elif kind == "response.function_call_arguments.delta":
            name, arguments = calls[index]
            calls[index] = (name, arguments + event["delta"])
        elif kind == "response.function_call_arguments.done":
            calls[index] = (event["name"], event["arguments"])
    content, reasoning = texts.values()
    return ParsedAnswer(content or None, reasoning or None, list(calls.values()))


def messages_body(chat: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a message, without the seed, which the server draws."""
    functions = [tool["function"] for tool in chat["tools"]]
    tools = [
        {"name": function["name"], "input_schema": function.get("parameters") or {"type": "object"}}
        for function in functions
    ]
    choice = chat.get("tool_choice")
    if isinstance(choice, dict):
        choice = {"type": "tool", "name": choice["function"]["name"]}
    elif choice == "required":
        choice = {"type": "any"}
    return chat | {"tools": tools, "tool_choice": choice}


def read_message(answer: Any) -> ParsedAnswer:
    blocks = answer["content"]
    texts = {"text": "", "thinking": ""}
    for block in blocks:
        if block["type"] in texts:
            texts[block["type"]] += block[block["type"]]
    calls = [
        (block["name"], json.dumps(block["input"]))
        for block in blocks
        if block["type"] == "tool_use"
    ]
    return ParsedAnswer(texts["text"] or None, texts["thinking"] or None, calls)


def read_message_stream(lines: Iterable[bytes]) -> ParsedAnswer:
    texts = {"text": "", "thinking": ""}
    calls: dict[int, tuple[str, str]] = {}
    for event in read_events(lines):
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls[event["index"]] = (event["content_block"]["name"], "")
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            kind = delta["type"].removesuffix("_delta")
            if kind in texts:
                texts[kind] += delta[kind]
            elif kind == "input_json":
                name, arguments = calls[event["index"]]
                calls[event["index"]] = (name, arguments + delta["partial_json"])
    answers = [(name, arguments or "{}") for name, arguments in calls.values()]
    return ParsedAnswer(texts["text"] or None, texts["thinking"] or None, answers)


APIS = {
    "messages": Api("/v1/messages", messages_body, read_message, read_message_stream),
    "chat": Api("/v1/chat/completions", dict, read_chat, read_chat_stream),
    "responses": Api("/v1/responses", responses_body, read_response, read_response_stream),
}

if __name__ == "__main__":
    sys.exit(main())
