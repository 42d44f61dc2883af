"""Certificates for tests, made with the `openssl` program."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from dynamo.communication.options import TlsFiles

_KEY_OPTIONS = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
_ALT_NAMES = "subjectAltName=IP:127.0.0.1,DNS:localhost"


def has_openssl() -> bool:
    """Return True if the `openssl` program is installed."""
    return shutil.which("openssl") is not None


def make_authority(folder: Path, name: str = "ca") -> Path:
    """Create a CA as `{name}.pem` and `{name}.key` in `folder`. Returns the former. Blocks."""
    _openssl(
        folder, f"req -x509 {_KEY_OPTIONS} -subj /CN={name} -keyout {name}.key -out {name}.pem"
    )
    return folder / f"{name}.pem"


def make_certificate(folder: Path, name: str, authority: str = "ca") -> TlsFiles:
    """Create a certificate for 127.0.0.1 and localhost, signed by the folder's CA. Blocks."""
    _openssl(folder, f"req {_KEY_OPTIONS} -subj /CN={name} -keyout {name}.key -out {name}.csr")
    (folder / "names").write_text(_ALT_NAMES)
    signed_by = f"-CA {authority}.pem -CAkey {authority}.key -CAcreateserial"
    _openssl(folder, f"x509 -req -in {name}.csr {signed_by} -days 2 -extfile names -out {name}.pem")
    files = (f"{authority}.pem", f"{name}.pem", f"{name}.key")
    return TlsFiles(*(str(folder / file) for file in files))


def _openssl(folder: Path, arguments: str) -> None:
    command = ["openssl", *arguments.split()]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
