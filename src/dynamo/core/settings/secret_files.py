"""Secrets in files: every secret setting NAME may be given as the path NAME_file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.core.redaction import remember_credentials, remember_secrets
from dynamo.core.settings.declare import SettingSpec
from dynamo.core.settings.keys import secret_file_key, setting_specs_by_key
from dynamo.core.settings.schema import Settings
from dynamo.core.settings.values import SourcedValue, split_list, type_name

INSECURE_NOTE = "insecure: "
"""Begins the notes that a start prints as warnings."""


class SecretFile(msgspec.Struct, frozen=True):
    """The content of a file, and whether every user of the host can read it."""

    text: str
    world_readable: bool = False


ReadSecretFile = Callable[[str], SecretFile]
"""Reads the file of this path. Raises `OSError`, `ValueError` or `RuntimeError`."""


def refuse_secret_files(path: str) -> SecretFile:
    """Raise `ValueError`, for programs that read no files."""
    del path
    raise ValueError("files of secrets are not read here")


Layer = dict[str, SourcedValue]


def remember_settings(settings: Settings) -> None:
    """Let this process show no secret of its settings."""
    for key, spec in setting_specs_by_key().items():
        value: Any = settings
        for name in key.split("."):
            value = getattr(value, name, None)
        if spec.meta.secret:
            remember_secrets((value,) if isinstance(value, str) else value or ())
        else:
            remember_credentials(value)


def load_secret_files(
    layers: Sequence[Mapping[str, SourcedValue]], read_file: ReadSecretFile
) -> tuple[Sequence[Layer], Mapping[str, str]]:
    """Return the layers, the strongest first, with each NAME_file read as NAME, and notes by key.

    An empty path counts as not given. Raises `ConfigError` for a file that is empty or cannot be
    read, and if one layer gives both a secret and its file.
    """
    result = [dict(layer) for layer in layers]
    notes: dict[str, str] = {}
    for spec in [spec for spec in setting_specs_by_key().values() if spec.meta.secret]:
        file_key = secret_file_key(spec.key)
        decided = False
        for layer in result:
            if decided or (file_key in layer and layer[file_key].raw in (None, "")):
                layer.pop(file_key, None)
            if not decided and (spec.key in layer or file_key in layer):
                _load_secret(spec, file_key, layer, notes, read_file)
                decided = True
    return result, notes


def _load_secret(
    spec: SettingSpec,
    file_key: str,
    layer: Layer,
    notes: dict[str, str],
    read_file: ReadSecretFile,
) -> None:
    """Read the file of a secret if `layer` names one, and add a note if others see the secret."""
    secret, file = layer.get(spec.key), layer.get(file_key)
    if secret is not None and file is not None:
        raise ConfigError(
            f"{spec.key} ({secret.origin}) and {file_key} ({file.origin}) are both given",
            hint="keep one of them",
            param=file_key,
        )
    if file is not None:
        raw, world_readable = _read(spec, file_key, file, read_file)
        layer[spec.key] = SourcedValue(raw, f"file {file.raw}")
        if world_readable:
            notes[file_key] = (
                f"{INSECURE_NOTE}every user of this host can read it; run `chmod 600 {file.raw}`"
            )
    elif secret is not None and secret.origin.startswith("flag "):
        notes[spec.key] = (
            f"{INSECURE_NOTE}every user of this host sees the flags of a process; use "
            f"{file_key} or the environment"
        )


def _read(
    spec: SettingSpec, file_key: str, file: SourcedValue, read_file: ReadSecretFile
) -> tuple[Any, bool]:
    """Return the raw value in a file, and whether every user of the host can read it. Items of a
    list stand on lines of their own, or are separated by commas."""
    try:
        content = read_file(str(file.raw))
        if type_name(spec) != "list":
            return content.text.strip(), content.world_readable
        items = [item for line in content.text.splitlines() for item in split_list(line)]
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{file_key} = {str(file.raw)!r} ({file.origin}): {reason}",
            hint="name a text file with the secret that only this user can read (mode 600)",
            param=file_key,
        ) from None
    return items, content.world_readable
