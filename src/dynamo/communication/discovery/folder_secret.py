"""The secret of a discovery folder, which the processes that share the folder prove to each other.

    ROOT/secret        the secret: 64 hex digits, mode 0600
    ROOT/LEASE/lock    the secret again, so that it survives the deletion of ROOT/secret

All calls block.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from dynamo.communication.discovery.folder import FolderReader
from dynamo.core.errors import ConfigError

log = logging.getLogger(__name__)

SECRET_FILE: Final = "secret"  # noqa: S105 - a file name
SECRET_BYTES: Final = 32


def open_secret(root: Path) -> str:
    """Return the secret of a folder. The first process creates it. Raises `ConfigError`.

    The result is "" if processes live in the folder and none of them has a secret. They are of an
    earlier version, or have certificates or a secret of the settings.
    """
    if secret := _read_secret(root):
        return secret
    reader = FolderReader(root)
    known = reader.read_lease_secrets()
    reader.close()
    if known == {""}:
        text = (
            "processes without the secret of this folder run; restart the deployment to protect it"
        )
        log.warning(text, extra={"fields": {"folder": str(root)}})
        return ""
    return keep_secret(root, max(known, default=secrets.token_hex(SECRET_BYTES)))


def keep_secret(root: Path, secret: str) -> str:
    """Write the secret if the file is missing. Returns the secret in the file, which may be that of
    another process. Raises `ConfigError`."""
    if existing := _read_secret(root):  # needs no space on a full disk
        return existing
    path = root / SECRET_FILE
    temporary = root / f".{SECRET_FILE}-{secrets.token_hex(8)}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o600), "w") as file:
            file.write(secret)
        os.link(temporary, path)
    except FileExistsError:
        return _read_secret(root)
    except OSError as error:
        raise ConfigError(
            f"the secret of the deployment, {path}, cannot be written: {error.strerror}",
            hint="free space on the disk, or choose another folder with --discovery file:PATH",
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
    return secret


def remove_unused_secret(root: Path) -> None:
    """Remove the secret if no process lives in the folder."""
    reader = FolderReader(root)
    if not reader.read_lease_secrets():
        for path in root.glob(f"*{SECRET_FILE}*"):
            path.unlink(missing_ok=True)
    reader.close()


def _read_secret(root: Path) -> str:
    """Return the secret in the file, "" if there is no file. Raises `ConfigError`."""
    path = root / SECRET_FILE
    hint = f"stop the processes of this deployment and delete {path}"
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(path, flags)) as file:
            status = os.fstat(file.fileno())
            secret = file.read(4 * SECRET_BYTES).strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the secret {path} cannot be read: {error}", hint=hint) from None
    private = stat.S_ISREG(status.st_mode) and not status.st_mode & 0o077
    if not private or status.st_uid != os.geteuid() or len(secret) < 2 * SECRET_BYTES:
        raise ConfigError(f"the secret {path} is damaged or open to other users", hint=hint)
    return secret
