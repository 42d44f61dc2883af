"""A certificate authority for tests, made by the `openssl` program."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from dynamo.communication.options import TlsFiles

_KEY_OPTIONS = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
_ALT_NAMES = "subjectAltName=IP:127.0.0.1,DNS:localhost"


def has_openssl() -> bool:
    """Without it no certificate can be made."""
    return shutil.which("openssl") is not None


def make_authority(folder: Path, name: str = "ca") -> Path:
    """`{name}.pem` and `{name}.key` in `folder`; the former. Blocks."""
    _openssl(
        folder, f"req -x509 {_KEY_OPTIONS} -subj /CN={name} -keyout {name}.key -out {name}.pem"
    )
    return folder / f"{name}.pem"


def make_certificate(folder: Path, name: str, authority: str = "ca") -> TlsFiles:
    """A certificate for 127.0.0.1 and localhost, signed by `authority` of the folder. Blocks."""
    _openssl(folder, f"req {_KEY_OPTIONS} -subj /CN={name} -keyout {name}.key -out {name}.csr")
    (folder / "names").write_text(_ALT_NAMES)
    signed_by = f"-CA {authority}.pem -CAkey {authority}.key -CAcreateserial"
    _openssl(folder, f"x509 -req -in {name}.csr {signed_by} -days 2 -extfile names -out {name}.pem")
    return TlsFiles(
        *(str(folder / one) for one in (f"{authority}.pem", f"{name}.pem", f"{name}.key"))
    )


def _openssl(folder: Path, words: str) -> None:
    command = ["openssl", *words.split()]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)  # noqa: S603
