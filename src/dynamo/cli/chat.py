"""`dynamo chat`: chat with a model of a server, in a terminal or through a pipe."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from http import HTTPStatus

from dynamo.cli.parsing import API_KEY_VARIABLE, DEPLOYMENT_HELP, Parser
from dynamo.core.errors import ConfigError, DynamoError

PROMPT = "> "
CONTINUATION = "\\"
IDLE_TIMEOUT_S = 300.0
EXAMPLES = """\
  dynamo chat                                       the deployment that runs here
  dynamo chat http://gpu-box:8000 --model llama --system "Answer in one sentence."
  printf 'Hello\\nAnd in French?\\n' | dynamo chat    each line is a message"""


def parser() -> Parser:
    """Return the parser: the server's URL and the request options."""
    parser = Parser(
        "dynamo chat",
        "Chat with a model of a Dynamo server or any other OpenAI-compatible server.\n\n"
        "/help lists the commands. Ctrl-C stops an answer, Ctrl-D ends the chat.",
        EXAMPLES,
        usage="[URL] [FLAGS]",
    )
    parser.add_argument("url", nargs="?", metavar="URL", help="default: the deployment here")
    parser.add_argument("--deployment", metavar="NAME", help=DEPLOYMENT_HELP)
    parser.add_argument("--model", metavar="NAME", help="default: the server's first model")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer in tokens")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is greedy sampling")
    parser.add_argument("--api-key", metavar="KEY", help=f"default: ${API_KEY_VARIABLE}")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Chat until the end of input. Returns 1 if a request of a pipe failed."""
    args = parser().parse(arguments)

    import dynamo_client

    try:
        return _run_chat(args)
    except dynamo_client.DynamoError as error:
        unauthorized = getattr(error, "status", 0) == HTTPStatus.UNAUTHORIZED
        hint = f"--api-key KEY, or ${API_KEY_VARIABLE}" if unauthorized else error.hint
        raise DynamoError(error.message, hint=hint) from error


def _run_chat(args: argparse.Namespace) -> int:
    from dynamo.cli.chat_session import ChatSession
    from dynamo.cli.stop import find_server_url
    from dynamo_client import DynamoConfig, SyncDynamoClient

    key = args.api_key or os.environ.get(API_KEY_VARIABLE) or None
    url = args.url or find_server_url(args.deployment)
    try:
        config = DynamoConfig(url, api_key=key, timeout=IDLE_TIMEOUT_S, max_retries=1)
        client = SyncDynamoClient(config)
    except ValueError as error:
        hint = "messages are no arguments: echo TEXT | dynamo chat"
        raise ConfigError(str(error), hint=hint) from error
    with client:
        options = {"max_tokens": args.max_tokens, "temperature": args.temperature}
        chat = ChatSession(client, args.system or "", options)
        chat.select_model(args.model or "")
        if sys.stdin.isatty():
            print(f"{chat.model} at {url}; /help for help, Ctrl-D ends.", file=sys.stderr)
            for line in _read_messages():
                if not chat.handle_line(line):
                    break
            return 0
        for line in sys.stdin:
            if not chat.handle_line(line.strip()):
                break
        return 1 if chat.failures else 0


def _read_messages() -> Iterator[str]:
    """Read messages from the keyboard with line editing and history. A line that ends with a
    backslash continues on the next."""
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
