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

Message = dict[str, str]


class Command(NamedTuple):
    """What stands after a slash. `run(chat, argument)`; False ends the chat."""

    argument: str
    help: str
    run: Callable[[Chat, str], bool]


class Chat:
    """One conversation. Answers go to standard output, all else to standard error."""

    def __init__(self, client: SyncDynamoClient, system: str, options: Mapping[str, Any]) -> None:
        self.model = ""
        self.failures = 0
        self.messages: list[Message] = []
        self._client = client
        self._system = system
        self._options = options
        self.clear()

    def clear(self) -> None:
        """Forget all but the system message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def models(self) -> list[str]:
        """What the server has. Raises `DynamoError`."""
        return [str(one["id"]) for one in self._client.list_models()]

    def choose(self, name: str) -> None:
        """Talk with `name`, or with the first there is. Raises `ConfigError` for another."""
        models = self.models()
        if not models:
            raise ConfigError("the server has no model (yet)", hint="`dynamo ps` shows its state")
        if name and name not in models:
            near = difflib.get_close_matches(name, models, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(models)}"
            raise ConfigError(f"the server has no model {name!r}", hint=hint)
        self.model = name or models[0]

    def take(self, line: str) -> bool:
        """One message or command; False: the end."""
        if not line:
            return True
        try:
            if line.startswith("/"):
                return self._command(line)
            self._answer(line)
        except (DynamoError, ConfigError) as error:
            self.failures += 1
            tell(f"error: {error.message}")
            if error.hint:
                tell(f"hint: {error.hint}")
        return True

    def _command(self, line: str) -> bool:
        name, _, argument = line[1:].partition(" ")
        command = COMMANDS.get(name)
        if command is None:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean /{near[0]}?" if near else "/help lists them"
            raise ConfigError(f"there is no command /{name}", hint=hint)
        return command.run(self, argument.strip())

    def _answer(self, line: str) -> None:
        """Ask and show. What has come when Ctrl-C stops it stays in the conversation; a question
        without an answer does not."""
        said = [*self.messages, {"role": "user", "content": line}]
        answer = Answer()
        try:
            answer.show(self._client, self.model, said, self._options)
        except KeyboardInterrupt:
            answer.stopped = True
        finally:
            if answer.parts:
                print(flush=True)
        text = "".join(answer.parts)
        if text or not answer.stopped:
            self.messages = [*said, {"role": "assistant", "content": text}]
        tell(answer.figures())


class Answer:
    """One answer, and how fast it came."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.stopped = False
        self._asked_s = self._first_s = self._last_s = time.monotonic()
        self._chunks = 0
        self._tokens = 0

    def show(
        self,
        client: SyncDynamoClient,
        model: str,
        messages: list[Message],
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
                        self._show(text)

    def _show(self, text: str) -> None:
        self._last_s = time.monotonic()
        if not self._chunks:
            self._first_s = self._last_s
        self._chunks += 1
        self.parts.append(text)
        print(text, end="", flush=True)

    def figures(self) -> str:
        """A line."""
        tokens = self._tokens or self._chunks
        took_s = self._last_s - self._first_s
        parts = [f"{tokens} tokens"]
        if tokens > 1 and took_s > 0:
            parts.append(f"{(tokens - 1) / took_s:.1f} tokens/s")
        if self._chunks:
            parts.append(f"first after {self._first_s - self._asked_s:.2f} s")
        if self.stopped:
            parts.append("stopped")
        return f"[{', '.join(parts)}]"


def tell(text: str) -> None:
    """To the person, not into the answers; dim on a terminal."""
    dim = sys.stderr.isatty()
    print(f"\x1b[2m{text}\x1b[0m" if dim else text, file=sys.stderr, flush=True)


def _model(chat: Chat, name: str) -> bool:
    if name:
        chat.choose(name)
        tell(f"talking with {chat.model}")
    else:
        for one in chat.models():
            tell(f"{'*' if one == chat.model else ' '} {one}")
    return True


def _save(chat: Chat, name: str) -> bool:
    if not name:
        raise ConfigError("/save needs a file's name")
    whole = {"model": chat.model, "messages": chat.messages}
    text = msgspec.json.format(msgspec.json.encode(whole), indent=2)
    try:
        Path(name).expanduser().write_bytes(text + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {name}: {error.strerror}") from error
    tell(f"saved {len(chat.messages)} messages to {name}")
    return True


def _clear(chat: Chat, _: str) -> bool:
    chat.clear()
    tell("all is forgotten")
    return True


def _help(_: Chat, __: str) -> bool:
    for name, command in COMMANDS.items():
        tell(f"/{name + ' ' + command.argument:<14} {command.help}")
    tell("A line is a message; one that ends with \\ goes on in the next.")
    return True


def _exit(_: Chat, __: str) -> bool:
    return False


COMMANDS = {
    "model": Command("[NAME]", "list the server's models, or talk with another", _model),
    "save": Command("FILE", "write the conversation as JSON", _save),
    "clear": Command("", "forget the conversation", _clear),
    "help": Command("", "this list", _help),
    "exit": Command("", "end, as Ctrl-D does", _exit),
}
