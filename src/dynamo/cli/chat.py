"""`dynamo chat`: a conversation with a server, in a terminal or through a pipe."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from http import HTTPStatus

from dynamo.cli.parsing import Parser
from dynamo.core.errors import ConfigError, DynamoError

DEFAULT_URL = "http://localhost:8000"
API_KEY_VARIABLE = "DYNAMO_API_KEY"
PROMPT = "> "
CONTINUATION = "\\"
IDLE_TIMEOUT_S = 300.0
EXAMPLES = """\
  dynamo chat                                       the server on http://localhost:8000
  dynamo chat http://gpu-box:8000 --model llama --system "Answer in one sentence."
  printf 'Hello\\nAnd in French?\\n' | dynamo chat    a line is a message"""


def parser() -> Parser:
    """The server, and what is asked of it."""
    made = Parser(
        "dynamo chat",
        "Talk with a model that a server has: Dynamo's, or any that speaks OpenAI's API.\n\n"
        "/help lists what can be typed. Ctrl-C stops an answer, Ctrl-D ends.",
        EXAMPLES,
        usage="[URL] [FLAGS]",
    )
    made.add_argument(
        "url", nargs="?", default=DEFAULT_URL, metavar="URL", help=f"default: {DEFAULT_URL}"
    )
    made.add_argument("--model", metavar="NAME", help="default: the first that the server has")
    made.add_argument("--system", metavar="TEXT", help="a system message that stands first")
    made.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    made.add_argument("--temperature", type=float, metavar="X", help="0: always the likeliest")
    made.add_argument("--api-key", metavar="KEY", help=f"default: ${API_KEY_VARIABLE}")
    return made


def run(arguments: Sequence[str]) -> int:
    """Talk until the end of input. Returns 1 if an answer failed that nobody saw fail."""
    found = parser().parse(arguments)

    import dynamo_client

    try:
        return _run_chat(found)
    except dynamo_client.DynamoError as error:
        unknown = getattr(error, "status", 0) == HTTPStatus.UNAUTHORIZED
        hint = f"--api-key KEY, or ${API_KEY_VARIABLE}" if unknown else error.hint
        raise DynamoError(error.message, hint=hint) from error


def _run_chat(found: argparse.Namespace) -> int:
    from dynamo.cli.chat_session import ChatSession
    from dynamo_client import DynamoConfig, SyncDynamoClient

    key = found.api_key or os.environ.get(API_KEY_VARIABLE) or None
    try:
        config = DynamoConfig(found.url, api_key=key, timeout=IDLE_TIMEOUT_S, max_retries=1)
        client = SyncDynamoClient(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    with client:
        options = {"max_tokens": found.max_tokens, "temperature": found.temperature}
        chat = ChatSession(client, found.system or "", options)
        chat.select_model(found.model or "")
        if sys.stdin.isatty():
            print(f"{chat.model} at {found.url}; /help for help, Ctrl-D ends.", file=sys.stderr)
            for line in _read_messages():
                if not chat.handle_line(line):
                    break
            return 0
        for line in sys.stdin:
            if not chat.handle_line(line.strip()):
                break
        return 1 if chat.failures else 0


def _read_messages() -> Iterator[str]:
    """Messages from a keyboard, with editing and history; a final backslash goes on."""
    import readline

    readline.set_auto_history(True)
    lines: list[str] = []
    while True:
        try:
            line = input("" if lines else PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            lines = []
            print("\n(Ctrl-D ends)")
            continue
        lines.append(line.removesuffix(CONTINUATION))
        if not line.endswith(CONTINUATION):
            yield "\n".join(lines).strip()
            lines = []
