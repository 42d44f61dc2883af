#!/usr/bin/env python3
"""Replace the frontend again and again while clients of several kinds keep their connections.

    benchmarks/frontend_restarts.py [--restarts 10] [--requests 2000] [--clients raw,new,openai,node]
                                    [--frontends 1]

Counts requests without a complete answer, of each kind of client. `raw` and `node` send one request after the
other on each of 16 kept connections. `new` opens a connection for each request. `openai` is OpenAI's client for
Python. None of them repeats a request. Every kind sends at least `--requests` requests, and until the last restart
has ended. Exits with 1 if one was lost.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from servers import start_ours
from targets import Targets

CONNECTIONS = 16
KINDS = ("raw", "new", "openai", "node")
BODY = {"model": "smol", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
NODE = """
const http = require('node:http'), readline = require('node:readline');
const [url, body, clients] = process.argv.slice(1);
const agent = new http.Agent({ keepAlive: true, maxSockets: +clients });
let ended = false;
readline.createInterface({ input: process.stdin }).on('close', () => { ended = true; });
const ask = () => new Promise((resolve) => {
  const lost = (error) => resolve(String(error));
  const request = http.request(url, { method: 'POST', agent,
    headers: { 'content-type': 'application/json' } }, (answer) => {
    let text = '';
    answer.on('data', (part) => { text += part; }).on('error', lost);
    answer.on('end', () => resolve(answer.statusCode === 200 && text.endsWith('}') ? 'ok'
      : answer.statusCode + text));
  });
  request.on('error', lost).end(body);
});
const run = async () => { while (!ended) console.log(await ask()); };
Promise.all(Array.from({ length: +clients }, run)).then(() => process.exit(0));
"""


class Load:
    """Clients of one kind, each in a thread, that send requests until `end`."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.outcomes: Counter[str] = Counter()
        self._url = url
        self._ended = threading.Event()
        run = {"raw": self._raw, "new": self._new, "openai": self._openai, "node": self._node}[kind]
        count = 1 if kind == "node" else CONNECTIONS
        self._threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Stop and wait for the last answers."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, ask: Callable[[], Any]) -> None:
        while not self._ended.is_set():
            try:
                ask()
                self.outcomes["ok"] += 1
            except Exception as error:
                self.outcomes[f"{type(error).__name__}: {error}"[:100]] += 1

    def _raw(self, *, keep: bool = True) -> None:
        connection = http.client.HTTPConnection(urlsplit(self._url).netloc, timeout=60)

        def ask() -> None:
            headers = {"content-type": "application/json"}
            try:
                connection.request("POST", "/v1/chat/completions", json.dumps(BODY), headers)
                answer = connection.getresponse()
                body = answer.read()
            except Exception:
                connection.close()
                raise
            if not keep:
                connection.close()
            if answer.status != 200 or not body.endswith(b"}"):
                raise OSError(f"{answer.status} {body[:80]!r}")

        self._repeat(ask)

    def _new(self) -> None:
        self._raw(keep=False)

    def _openai(self) -> None:
        import openai

        client = openai.OpenAI(base_url=f"{self._url}/v1", api_key="-", max_retries=0, timeout=60)
        self._repeat(lambda: client.chat.completions.create(**BODY))

    def _node(self) -> None:
        arguments = [f"{self._url}/v1/chat/completions", json.dumps(BODY), str(CONNECTIONS)]
        node = subprocess.Popen(
            ["node", "-e", NODE, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert node.stdin is not None
        assert node.stdout is not None
        for line in node.stdout:
            self.outcomes[line.strip()[:100]] += 1
            if self._ended.is_set() and not node.stdin.closed:
                node.stdin.close()


def _is_installed(kind: str) -> bool:
    """Whether the client is on this machine. Says so if it is not."""
    missing = (kind == "openai" and not importlib.util.find_spec("openai")) or (
        kind == "node" and not shutil.which("node")
    )
    if missing:
        print(f"{kind} is not installed and is left out", file=sys.stderr)
    return not missing


def main() -> None:
    """Restart under load, and report what was lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", default=",".join(KINDS))
    parser.add_argument("--frontends", type=int, default=1)
    args = parser.parse_args()
    kinds = [kind for kind in args.clients.split(",") if _is_installed(kind)]
    more = ("--http-workers", str(args.frontends), "--timing", "constant:2,1")
    server = start_ours("", 2, 1, "round_robin", *more)
    try:
        loads = [Load(kind, server.url) for kind in kinds]
        port = server.url.rpartition(":")[2]
        command = (sys.executable, "-m", "dynamo", "restart", "frontend", "--deployment", port)
        for _ in range(args.restarts):
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        while any(sum(load.outcomes.values()) < args.requests for load in loads):
            threading.Event().wait(0.1)
        for load in loads:
            load.end()
    finally:
        server.stop()
    targets, results = Targets(), {}
    for load in loads:
        results[load.kind] = dict(load.outcomes)
        lost = sum(count for outcome, count in load.outcomes.items() if outcome != "ok")
        targets.at_most(f"lost, {load.kind}", lost, 0)
    targets.print_report(results, f"{args.restarts} restarts of {args.frontends} frontends")
    sys.exit(targets.exit_code)


if __name__ == "__main__":
    main()
