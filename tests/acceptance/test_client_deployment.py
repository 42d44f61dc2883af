"""`dynamo_client`, `dynamo chat` and `in=batch:` against whole deployments."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dynamo_client import DynamoAPIError, DynamoClient, DynamoConfig, SyncDynamoClient

HI = [{"role": "user", "content": "the quick brown fox"}]
DYNAMO = [sys.executable, "-m", "dynamo"]


@pytest.fixture
def config(mock_deployment: Any) -> DynamoConfig:
    return DynamoConfig(mock_deployment.url)


async def test_every_call(config: DynamoConfig) -> None:
    async with DynamoClient(config) as client:
        assert (await client.health_check())["models"] == ["tiny"]
        assert [model["id"] for model in await client.list_models()] == ["tiny"]
        tokens = await client.tokenize("a lazy dog")
        assert await client.detokenize(tokens) == "a lazy dog"
        answer = await client.completion("a lazy", max_tokens=5)
        chunks = [c async for c in await client.completion_stream("a lazy", max_tokens=5)]
        whole = "".join(c["choices"][0]["text"] for c in chunks if c["choices"])
        assert whole == answer["choices"][0]["text"]
        with pytest.raises(DynamoAPIError, match="tiny") as caught:
            await client.chat_completion(HI, "nobody")
        assert caught.value.code == "model_not_found"
        assert caught.value.request_id


def test_the_sync_client_streams_the_whole_answer(config: DynamoConfig) -> None:
    with SyncDynamoClient(config) as client:
        whole = client.chat_completion(HI, max_tokens=9)["choices"][0]["message"]["content"]
        chunks = list(client.chat_completion(HI, max_tokens=9, stream=True))
        assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == whole


async def test_closing_a_stream_cancels_the_request(config: DynamoConfig) -> None:
    async with DynamoClient(config) as client:
        async for _ in await client.chat_completion(HI, max_tokens=7000, stream=True):
            break
        async with asyncio.timeout(10):
            while (await client.health_check())["active_requests"]:
                await asyncio.sleep(0.05)


def test_chat_through_a_pipe(mock_deployment: Any, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    lines = f"/model tiny\nthe quick\n/clear\nfox\n/save {saved}\n/exit\nnever\n"
    command = [*DYNAMO, "chat", mock_deployment.url, "--max-tokens", "6", "--system", "Be brief."]
    completed = subprocess.run(command, input=lines, capture_output=True, text=True)

    assert completed.returncode == 0, completed.stderr
    assert completed.stderr.count("[6 tokens, ") == 2
    conversation = json.loads(saved.read_text())
    assert conversation["model"] == "tiny"
    roles = [message["role"] for message in conversation["messages"]]
    assert roles == ["system", "user", "assistant"]
    assert completed.stdout.endswith(conversation["messages"][-1]["content"] + "\n")


def test_ctrl_c_stops_the_answer_and_ctrl_d_ends(mock_deployment: Any) -> None:
    primary, secondary = pty.openpty()
    command = [*DYNAMO, "chat", mock_deployment.url, "--max-tokens", "8000"]
    environ = os.environ | {"TERM": "dumb"}
    child = subprocess.Popen(
        command, stdin=secondary, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
    )
    os.close(secondary)
    assert child.stdout is not None
    os.write(primary, b"the quick\n")
    output = b""
    while len(output) < 40:
        output += os.read(child.stdout.fileno(), 4096)
    child.send_signal(signal.SIGINT)
    os.write(primary, b"\x04")
    _, err = child.communicate(timeout=30)
    os.close(primary)

    assert child.returncode == 0, err.decode()
    assert b"Traceback" not in err
    assert b" tokens" in err


def test_chat_without_a_server() -> None:
    completed = subprocess.run([*DYNAMO, "chat", "localhost:1"], capture_output=True, text=True)

    assert completed.returncode == 1
    assert "cannot connect to localhost:1" in completed.stderr
    assert "dynamo run" in completed.stderr


def test_a_batch_continues_after_an_interruption(
    tiny_model: Path, tmp_path: Path, runtime_environ: dict[str, str]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "in.out.jsonl"
    body = {"model": "tiny", "messages": HI, "max_tokens": 4}
    url = "/v1/chat/completions"
    common = {"method": "POST", "url": url, "body": body}
    lines: list[dict[str, Any]] = [{"custom_id": f"r{number}", **common} for number in range(9)]
    lines += [{"prompt": "a lazy", "max_tokens": 3}, {"text": "hi", "max_tokens": 2}]
    lines += [{"id": "bad", "messages": HI, "model": "nobody"}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    mock = ["out=mock", str(tiny_model), "--model-name", "tiny", "--speedup-ratio", "1000"]
    command = [*DYNAMO, "run", f"in=batch:{source}", *mock, "--concurrency", "3"]
    environ = os.environ | runtime_environ

    first = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert first.returncode == 1, first.stderr
    assert "11 answered, 1 failed" in first.stderr
    records = map(json.loads, output.read_text().splitlines())
    by_id = {record["custom_id"]: record for record in records}
    assert len(by_id) == 12
    assert by_id["r3"]["response"]["body"]["usage"]["completion_tokens"] == 4
    assert by_id["line-10"]["response"]["body"]["object"] == "text_completion"
    assert by_id["bad"]["error"]["code"] == "model_not_found"

    # Cut the output as a kill during a write would.
    first_lines = output.read_bytes().splitlines(keepends=True)[:5]
    output.write_bytes(b"".join(first_lines) + b'{"custom_id": "r')
    source.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    second = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert second.returncode == 0, second.stderr
    names = [json.loads(line)["custom_id"] for line in output.read_text().splitlines()]
    assert sorted(set(names) - {"bad"}) == sorted({*by_id} - {"bad"})
    third = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert third.returncode == 0
    assert "11 answered before" in third.stderr
