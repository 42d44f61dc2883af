"""A chat session: its messages, streamed answers and slash commands."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dynamo.cli.parsing import write_file
from dynamo.core.errors import ConfigError, nearest_name_hint
from dynamo_client import DynamoError, SyncDynamoClient

ChatMessage = dict[str, str]


class SlashCommand(NamedTuple):
    """A command typed after a slash. `run(chat, argument)` returns False to end the chat."""

    argument: str
    help: str
    run: Callable[[ChatSession, str], bool]


class ChatSession:
    """A conversation. Answers go to standard output, everything else to standard error."""

    def __init__(self, client: SyncDynamoClient, system: str, options: Mapping[str, Any]) -> None:
        self.model = ""
        self.failures = 0
        self.messages: list[ChatMessage] = []
        self._client = client
        self._system = system
        self._options = options
        self.clear()

    def clear(self) -> None:
        """Delete all messages but the system message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def list_models(self) -> list[str]:
        """Fetch the names of the server's models. Raises `DynamoError`."""
        return [str(model["id"]) for model in self._client.list_models()]

    def select_model(self, name: str) -> None:
        """Use the model `name`, or the first one. Raises `ConfigError` for an unknown name."""
        models = self.list_models()
        if not models:
            raise ConfigError("the server lists no models", hint="`dynamo ps` shows its state")
        if name and name not in models:
            hint = nearest_name_hint(name, models)
            raise ConfigError(f"the server has no model {name!r}", hint=hint)
        self.model = name or models[0]

    def handle_line(self, line: str) -> bool:
        """Send a message or run a slash command. Returns False if the chat ends."""
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
            hint = nearest_name_hint(name, SLASH_COMMANDS, "/help lists the commands")
            raise ConfigError(f"unknown command /{name}", hint=hint)
        return command.run(self, argument.strip())

    def _send_message(self, line: str) -> None:
        """Send a message and print the answer. An answer that Ctrl-C stopped stays in the
        conversation; a message without any answer is dropped."""
        messages = [*self.messages, {"role": "user", "content": line}]
        answer = ChatAnswer()
        try:
            answer.stream_reply(self._client, self.model, messages, self._options)
        except KeyboardInterrupt:
            answer.interrupted = True
        finally:
            if answer.parts:
                print(flush=True)
        text = "".join(answer.parts)
        if text or not answer.interrupted:
            self.messages = [*messages, {"role": "assistant", "content": text}]
        print_notice(answer.format_statistics())


class ChatAnswer:
    """A streamed answer and its timing."""

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
        """Send the messages and print the answer as it arrives. Raises `DynamoError`."""
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
        """Return a line with the number of tokens, their rate and the time to the first one."""
        tokens = self._tokens or self._chunks
        duration_s = self._last_text_s - self._first_text_s
        parts = [f"{tokens} tokens"]
        if tokens > 1 and duration_s > 0:
            parts.append(f"{(tokens - 1) / duration_s:.1f} tokens/s")
        if self._chunks:
            parts.append(f"first token after {self._first_text_s - self._sent_s:.2f} s")
        if self.interrupted:
            parts.append("stopped")
        return f"[{', '.join(parts)}]"


def print_notice(text: str) -> None:
    """Print a line to standard error, dim on a terminal."""
    styled = f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text
    print(styled, file=sys.stderr, flush=True)


def _model_command(chat: ChatSession, name: str) -> bool:
    if name:
        chat.select_model(name)
        print_notice(f"model: {chat.model}")
    else:
        for model in chat.list_models():
            print_notice(f"{'*' if model == chat.model else ' '} {model}")
    return True


def _save_command(chat: ChatSession, name: str) -> bool:
    if not name:
        raise ConfigError("/save needs a file name")
    conversation = {"model": chat.model, "messages": chat.messages}
    text = msgspec.json.format(msgspec.json.encode(conversation), indent=2)
    write_file(Path(name).expanduser(), text + b"\n")
    print_notice(f"saved {len(chat.messages)} messages to {name}")
    return True


def _clear_command(chat: ChatSession, _: str) -> bool:
    chat.clear()
    print_notice("conversation cleared")
    return True


def _help_command(_: ChatSession, __: str) -> bool:
    for name, command in SLASH_COMMANDS.items():
        print_notice(f"/{name + ' ' + command.argument:<14} {command.help}")
    print_notice("Each line is a message. A line that ends with \\ continues on the next.")
    return True


def _exit_command(_: ChatSession, __: str) -> bool:
    return False


SLASH_COMMANDS = {
    "model": SlashCommand(
        "[NAME]", "list the server's models, or switch to another", _model_command
    ),
    "save": SlashCommand("FILE", "write the conversation as JSON", _save_command),
    "clear": SlashCommand("", "clear the conversation", _clear_command),
    "help": SlashCommand("", "list the commands", _help_command),
    "exit": SlashCommand("", "end the chat, like Ctrl-D", _exit_command),
}
