"""Names and ids of LoRA adapters, and the orders to load and unload them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from dynamo.core.errors import DECODE_ERRORS, ConfigError, ProtocolError

ADAPTERS_ENDPOINT = "adapters"
MODULES_KEY = "engine.lora_modules"


class AdapterOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """The order to load the adapter in the folder `path` under a name, or to unload it if `path` is
    empty. `replace`: instead of another adapter of this name. `model`: the adapted model; "": there
    is only one whose workers can have adapters."""

    name: str
    path: str = ""
    replace: bool = False
    model: str = ""


encode_order = msgspec.msgpack.Encoder().encode
_decode_order = msgspec.msgpack.Decoder(AdapterOrder).decode


def decode_order(payload: bytes) -> AdapterOrder:
    """Return the order in a payload. Raises `ProtocolError`."""
    try:
        return _decode_order(payload)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"not an order for an adapter: {error}") from error


def adapter_id(name: str, digest: str) -> str:
    """Return the id of a LoRA adapter: its name and a digest of its files. An adapter that is
    loaded again with other weights has another id."""
    return f"{name}@{digest}"


def adapter_name(adapter: str) -> str:
    """Return the name in an adapter's id."""
    return adapter.rpartition("@")[0]


def parse_lora_modules(modules: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield name and path of each `NAME=PATH`, vLLM's `{"name": NAME, "path": PATH}`, and pair of
    `{NAME: PATH}`. Raises `ConfigError`."""
    for module in modules:
        for name, path in _read_module(module):
            if not (name and path and isinstance(name, str) and isinstance(path, str)):
                raise ConfigError(
                    f"{module!r} names no LoRA adapter (--lora-modules)",
                    hint="write NAME=FOLDER",
                    param=MODULES_KEY,
                )
            yield name, path


def _read_module(module: str) -> Iterable[tuple[object, object]]:
    if not module.startswith("{"):
        name, _, path = module.partition("=")
        return [(name, path)]
    try:
        content = msgspec.json.decode(module)
    except ValueError:
        return [("", "")]
    if not isinstance(content, dict) or not content:
        return [("", "")]
    if "name" in content:
        return [(content.get("name"), content.get("path"))]
    return content.items()
