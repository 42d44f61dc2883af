"""The console in a real browser, beside a deployment with names that would be markup."""

from __future__ import annotations

import asyncio
import gzip
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.cluster import Cluster
from tests.support.chromium import CHROMIUM, Chromium

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
AXE = Path(__file__).parents[1] / "data/axe/axe.min.js.gz"
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chromium]:
    with Chromium(tmp_path) as browser:
        yield browser


def chat(cluster: Cluster, name: str) -> None:
    body = {"model": HOSTILE, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
    headers = {"content-type": "application/json", "x-request-id": name}
    url = f"http://127.0.0.1:{cluster.port}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.status == 200


def look(cluster: Cluster, browser: Chromium) -> None:
    browser.resize(1180)
    cluster.wait_blocking(lambda: cluster.ready("observer"))
    browser.open(f"http://127.0.0.1:{cluster.port}/")  # leads to the console
    browser.wait_for("document.querySelectorAll('[aria-label=Workers] tbody tr').length === 2")
    (observer,) = cluster.ready("observer")
    assert browser.run("location.href").startswith(f"{observer.address}/console")
    browser.wait_for("document.querySelector('[aria-label=Promise]')")
    assert HOSTILE in browser.run("document.body.innerText")

    browser.wait_for("document.querySelector('[aria-label=\"Slow requests\"] a')")
    browser.run("document.querySelector('nav a[href=\"#requests\"]').focus()")
    browser.press("Enter")
    browser.wait_for("document.querySelector('[aria-label=Requests] a')")
    assert browser.run("document.activeElement.tagName") == "H1"
    browser.run("document.querySelector('[aria-label=Requests] a').focus()")
    browser.press("Enter")
    browser.wait_for("document.querySelector('[aria-label=Stages]')")
    shown = browser.run("document.body.innerText")
    assert "the-slow-one" in shown
    assert HOSTILE in shown
    stages = browser.run(
        "[...document.querySelectorAll('[aria-label=Stages] tbody tr')]"
        ".map(row => row.firstChild.innerText)"
    )
    assert {"tokenise", "prefill", "decode"} <= {*stages}
    look_at_workers(browser)
    use_the_playground(browser)
    for page in (
        "overview",
        "workers",
        "requests",
        "request/the-slow-one",
        "settings",
        "playground",
    ):
        browser.resize(390)
        browser.run(f"location.hash = '{page}'")
        browser.wait_for("document.querySelector('main :is(table, textarea)')")
        # A phone makes its page wider, rather than to scroll it.
        assert browser.run("document.documentElement.scrollWidth") <= 390, page
    assert browser.run("document.querySelectorAll('main img').length") == 0
    assert browser.problems == []
    own = (observer.address, f"http://127.0.0.1:{cluster.port}/")
    assert [url for url in browser.requested if not url.startswith(own)] == []


def look_at_workers(browser: Chromium) -> None:
    browser.run("location.hash = 'workers'")
    browser.wait_for("document.querySelector('[aria-label*=\"waiting of worker-1: up to\"]')")
    browser.run("document.querySelector('[aria-label=Workers] a').click()")
    browser.wait_for("document.querySelectorAll('svg.large polyline').length === 5")
    read_a_curve(browser)
    browser.run("[...document.querySelectorAll('dl a')].at(-1).click()")
    browser.wait_for("document.querySelector('pre').innerText.includes('worker serves')")
    assert browser.run("document.querySelector('select').value") == "worker-1"
    assert HOSTILE in browser.run("document.querySelector('pre').innerText")
    browser.run("location.hash = 'settings'")
    browser.wait_for("document.querySelector('[aria-label=Settings]')")
    assert "flag --model-name" in browser.run("document.querySelector('main').innerText")


def read_a_curve(browser: Chromium) -> None:
    """Keys and the mouse choose the time of which the values are told."""
    captions = "[...document.querySelectorAll('main h2 small')].map(each => each.innerText)"
    browser.run(f"newest = {captions}[0]; document.querySelector('input[type=range]').focus()")
    for _ in range(3):
        browser.press("ArrowLeft")
    browser.wait_for(f"new Set({captions}.map(text => text.split(',')[0])).size === 1")
    assert browser.run(f"{captions}[0] < newest")
    assert browser.run("document.querySelectorAll('svg.large line').length") == 5
    box = browser.run("document.querySelector('svg.large').getBoundingClientRect().toJSON()")
    for x, y, first in ((box["x"], box["y"] + 9, True), (1, 1, False)):
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        chosen = browser.run("document.querySelector('input[type=range]').value === '0'")
        assert chosen is first


def use_the_playground(browser: Chromium) -> None:
    browser.run("location.hash = 'playground'")
    browser.wait_for("document.querySelector('option')")
    browser.run("document.querySelector('textarea').focus()")
    browser.call("Input.insertText", text=f"Say {HOSTILE}")
    browser.press("Enter")
    browser.wait_for("document.querySelector('article [aria-label=Stages]')")
    turn = browser.run("document.querySelector('article').innerText")
    assert f"Say {HOSTILE}" in turn
    assert "tokens/s" in turn
    assert "worker-" in turn


async def restart_the_observer(cluster: Cluster, browser: Chromium) -> None:
    """An open page says that the observer is away, and goes on with the next one."""
    await asyncio.to_thread(browser.run, "location.hash = 'overview'; said = []")
    await asyncio.to_thread(
        browser.run,
        "new MutationObserver(() => said.push(document.getElementById('health').innerText))"
        ".observe(document.getElementById('health'), {characterData: true, subtree: true})",
    )
    code, shown = await cluster.try_command("restart", "observer")
    assert code == 0, shown
    await asyncio.to_thread(
        browser.wait_for,
        "said.some(text => text.endsWith('connecting again'))"
        " && document.getElementById('health').innerText.startsWith('all processes ready')",
    )
    await asyncio.to_thread(chat, cluster, "after-the-restart")
    await asyncio.to_thread(
        browser.wait_for, "document.querySelector('main').innerText.includes('after-the-restart')"
    )


async def test_a_person_finds_a_slow_request(
    tiny_model: Path, tmp_path: Path, browser: Chromium
) -> None:
    flags = ("--observer",)
    with Cluster(tiny_model, tmp_path, workers=2, flags=flags, name=HOSTILE) as cluster:
        await asyncio.to_thread(chat, cluster, "the-slow-one")
        await asyncio.to_thread(look, cluster, browser)
        await restart_the_observer(cluster, browser)


def check_accessibility(cluster: Cluster, browser: Chromium) -> None:
    axe = gzip.decompress(AXE.read_bytes()).decode()
    cluster.wait_blocking(lambda: cluster.ready("observer"))
    browser.open(f"http://127.0.0.1:{cluster.port}/")
    browser.wait_for("document.querySelector('[aria-label=\"Slow requests\"] a')")
    browser.run(f"{axe}; 0")
    worker = cluster.ready("worker")[0].instance
    pages = (
        *("overview", "workers", f"worker/{worker}", "requests", "request/the-slow-one"),
        *("logs", "settings", "playground"),
    )
    for page in pages:
        browser.run(f"location.hash = '{page}'")
        browser.wait_for("document.querySelector('main :is(table, pre, textarea, svg)')")
        for width, dark in ((390, False), (1180, True)):
            browser.resize(width, dark=dark)
            passed, violations = browser.run(
                "axe.run().then(({violations, passes}) => [passes.length, violations.map("
                "({id, nodes}) => `${id}: ${nodes.map(({html}) => html).join()}`)])"
            )
            assert passed > 10, page
            assert violations == [], page


async def test_axe_finds_no_violation(tiny_model: Path, tmp_path: Path, browser: Chromium) -> None:
    flags = ("--observer",)
    with Cluster(tiny_model, tmp_path, workers=1, flags=flags, name=HOSTILE) as cluster:
        await asyncio.to_thread(chat, cluster, "the-slow-one")
        await asyncio.to_thread(check_accessibility, cluster, browser)


THOUGHT = "Hm, a long thought of many words, which no later prompt has."
SCRIPT = """\
{"when": "again", "text": "As before."}
{"when": "think", "text": "<think>%s</think>It is 4."}
"""


def ask_a_model_that_thinks(cluster: Cluster, browser: Chromium) -> None:
    cluster.wait_blocking(lambda: cluster.ready("observer"))
    (observer,) = cluster.ready("observer")
    browser.open(f"{observer.address}/console#playground")
    browser.wait_for("document.querySelector('option')")
    for count, text in enumerate(("think", "again"), 1):
        browser.run("document.querySelector('textarea').focus()")
        browser.call("Input.insertText", text=text)
        browser.press("Enter")
        browser.wait_for(f"document.querySelectorAll('[aria-label=Stages]').length === {count}")
    shown = browser.run("[...document.querySelectorAll('article p')].map(part => part.innerText)")
    assert shown[:3] == ["think", THOUGHT, "It is 4."]
    stories = browser.run(f"fetch('{observer.address}/requests').then(answer => answer.json())")
    again, thought = (each["prompt_tokens"] for each in stories["requests"])
    assert thought < again < thought + len(THOUGHT)  # a token of the tiny model is a byte


async def test_the_playground_shows_reasoning_and_does_not_send_it(
    tiny_model: Path, tmp_path: Path, browser: Chromium
) -> None:
    (tmp_path / "script").write_text(SCRIPT % THOUGHT)
    flags = ("out=script", "--script", "script", "--tool-format", "qwen3", "--observer")
    with Cluster(tiny_model, tmp_path, workers=1, flags=flags) as cluster:
        await asyncio.to_thread(ask_a_model_that_thinks, cluster, browser)


def use_a_key(cluster: Cluster, browser: Chromium) -> None:
    cluster.wait_blocking(lambda: cluster.ready("observer"))
    (observer,) = cluster.ready("observer")
    browser.open(f"{observer.address}/console#playground")
    for key, is_known in (("wrong", False), ("right", True)):
        browser.wait_for("document.querySelector('dialog[open]')")
        browser.wait_for("document.activeElement.id === 'key'")
        browser.run("document.activeElement.select()")
        browser.call("Input.insertText", text=key)
        browser.press("Enter")
        if not is_known:
            browser.wait_for("document.querySelector('dialog[open] [role=alert]')?.innerText")
    browser.wait_for("document.querySelector('option')")  # the frontend takes the key, too
    assert not browser.run("document.querySelector('dialog').open")
    browser.run("location.hash = 'overview'")
    browser.wait_for("document.querySelectorAll('[aria-label=Workers] tbody tr').length === 1")


async def test_the_console_asks_for_a_key(
    tiny_model: Path, tmp_path: Path, browser: Chromium
) -> None:
    environ = {"DYNAMO_SERVER__API_KEYS": "right"}
    flags = ("--observer",)
    with Cluster(tiny_model, tmp_path, workers=1, flags=flags, environ=environ) as cluster:
        await asyncio.to_thread(use_a_key, cluster, browser)
