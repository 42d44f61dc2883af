"""What a chat says and keeps: messages, answers as they come, and commands."""

from __future__ import annotations

import difflib
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dynamo.core.errors import ConfigError
from dynamo_client import DynamoError, SyncDynamoClient

ChatMessage = dict[str, str]


class SlashCommand(NamedTuple):
    """What stands after a slash. `run(chat, argument)`; False ends the chat."""

    argument: str
    help: str
    run: Callable[[ChatSession, str], bool]


class ChatSession:
    """One conversation. Answers go to standard output, all else to standard error."""

    def __init__(self, client: SyncDynamoClient, system: str, options: Mapping[str, Any]) -> None:
        self.model = ""
        self.failures = 0
        self.messages: list[ChatMessage] = []
        self._client = client
        self._system = system
        self._options = options
        self.clear()

    def clear(self) -> None:
        """Forget all but the system message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def list_models(self) -> list[str]:
        """What the server has. Raises `DynamoError`."""
        return [str(one["id"]) for one in self._client.list_models()]

    def select_model(self, name: str) -> None:
        """Talk with `name`, or with the first there is. Raises `ConfigError` for another."""
        models = self.list_models()
        if not models:
            raise ConfigError("the server has no model (yet)", hint="`dynamo ps` shows its state")
        if name and name not in models:
            near = difflib.get_close_matches(name, models, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(models)}"
            raise ConfigError(f"the server has no model {name!r}", hint=hint)
        self.model = name or models[0]

    def handle_line(self, line: str) -> bool:
        """One message or command; False: the end."""
        if not line:
            return True
        try:
            if line.startswith("/"):
                return self._run_command(line)
            self._send_message(line)
        except (DynamoError, ConfigError) as error:
            self.failures += 1
            print_notice(f"error: {error.message}")
            if error.hint:
                print_notice(f"hint: {error.hint}")
        return True

    def _run_command(self, line: str) -> bool:
        name, _, argument = line[1:].partition(" ")
        command = SLASH_COMMANDS.get(name)
        if command is None:
            near = difflib.get_close_matches(name, SLASH_COMMANDS, n=1)
            hint = f"did you mean /{near[0]}?" if near else "/help lists them"
            raise ConfigError(f"there is no command /{name}", hint=hint)
        return command.run(self, argument.strip())

    def _send_message(self, line: str) -> None:
        """Ask and show. What has come when Ctrl-C stops it stays in the conversation; a question
        without an answer does not."""
        said = [*self.messages, {"role": "user", "content": line}]
        answer = ChatAnswer()
        try:
            answer.stream_reply(self._client, self.model, said, self._options)
        except KeyboardInterrupt:
            answer.interrupted = True
        finally:
            if answer.parts:
                print(flush=True)
        text = "".join(answer.parts)
        if text or not answer.interrupted:
            self.messages = [*said, {"role": "assistant", "content": text}]
        print_notice(answer.format_statistics())


class ChatAnswer:
    """One answer, and how fast it came."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.interrupted = False
        self._sent_s = self._first_text_s = self._last_text_s = time.monotonic()
        self._chunks = 0
        self._tokens = 0

    def stream_reply(
        self,
        client: SyncDynamoClient,
        model: str,
        messages: list[ChatMessage],
        options: Mapping[str, Any],
    ) -> None:
        """Print it as it comes. Raises `DynamoError`."""
        usage = {"include_usage": True}
        with client.chat_completion(
            messages, model, stream=True, stream_options=usage, **options
        ) as stream:
            for chunk in stream:
                self._tokens = (chunk.get("usage") or {}).get("completion_tokens", self._tokens)
                for choice in chunk.get("choices") or ():
                    if text := (choice.get("delta") or {}).get("content"):
                        self._print_text(text)

    def _print_text(self, text: str) -> None:
        self._last_text_s = time.monotonic()
        if not self._chunks:
            self._first_text_s = self._last_text_s
        self._chunks += 1
        self.parts.append(text)
        print(text, end="", flush=True)

    def format_statistics(self) -> str:
        """A line."""
        tokens = self._tokens or self._chunks
        took_s = self._last_text_s - self._first_text_s
        parts = [f"{tokens} tokens"]
        if tokens > 1 and took_s > 0:
            parts.append(f"{(tokens - 1) / took_s:.1f} tokens/s")
        if self._chunks:
            parts.append(f"first after {self._first_text_s - self._sent_s:.2f} s")
        if self.interrupted:
            parts.append("stopped")
        return f"[{', '.join(parts)}]"


def print_notice(text: str) -> None:
    """To the person, not into the answers; dim on a terminal."""
    dim = sys.stderr.isatty()
    print(f"\x1b[2m{text}\x1b[0m" if dim else text, file=sys.stderr, flush=True)


def _model_command(chat: ChatSession, name: str) -> bool:
    if name:
        chat.select_model(name)
        print_notice(f"talking with {chat.model}")
    else:
        for one in chat.list_models():
            print_notice(f"{'*' if one == chat.model else ' '} {one}")
    return True


def _save_command(chat: ChatSession, name: str) -> bool:
    if not name:
        raise ConfigError("/save needs a file's name")
    whole = {"model": chat.model, "messages": chat.messages}
    text = msgspec.json.format(msgspec.json.encode(whole), indent=2)
    try:
        Path(name).expanduser().write_bytes(text + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {name}: {error.strerror}") from error
    print_notice(f"saved {len(chat.messages)} messages to {name}")
    return True


def _clear_command(chat: ChatSession, _: str) -> bool:
    chat.clear()
    print_notice("all is forgotten")
    return True


def _help_command(_: ChatSession, __: str) -> bool:
    for name, command in SLASH_COMMANDS.items():
        print_notice(f"/{name + ' ' + command.argument:<14} {command.help}")
    print_notice("A line is a message; one that ends with \\ goes on in the next.")
    return True


def _exit_command(_: ChatSession, __: str) -> bool:
    return False


SLASH_COMMANDS = {
    "model": SlashCommand(
        "[NAME]", "list the server's models, or talk with another", _model_command
    ),
    "save": SlashCommand("FILE", "write the conversation as JSON", _save_command),
    "clear": SlashCommand("", "forget the conversation", _clear_command),
    "help": SlashCommand("", "this list", _help_command),
    "exit": SlashCommand("", "end, as Ctrl-D does", _exit_command),
}
