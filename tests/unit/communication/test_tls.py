"""Tests of what is said about certificate files that cannot be used."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.support.certificates import has_openssl, make_authority, make_certificate

from dynamo.communication.options import TlsFiles
from dynamo.communication.tls import mutual_tls_contexts
from dynamo.core.errors import ConfigError

pytestmark = pytest.mark.skipif(not has_openssl(), reason="needs the openssl program")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    folder = tmp_path_factory.mktemp("certificates")
    make_authority(folder)
    return make_certificate(folder, "node")


def refusal(ca: str, cert: str, key: str) -> str:
    with pytest.raises(ConfigError) as caught:
        mutual_tls_contexts(TlsFiles(ca, cert, key))
    return caught.value.message


def test_an_unreadable_file_is_named_alone(node: TlsFiles, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.pem")
    expected = f"cannot read {missing!r}: No such file or directory"
    assert refusal(missing, node.cert, node.key) == expected
    assert refusal(node.ca, missing, node.key) == expected
    assert refusal(node.ca, node.cert, missing) == expected


def test_the_key_of_another_certificate_is_named(node: TlsFiles) -> None:
    other = node.ca.replace("ca.pem", "ca.key")
    expected = f"the key {other!r} is not that of the certificate {node.cert!r}"
    assert refusal(node.ca, node.cert, other) == expected


def test_a_file_in_another_format_is_named(node: TlsFiles, tmp_path: Path) -> None:
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    assert f"cannot load the CA {str(text)!r}" in refusal(str(text), node.cert, node.key)
    assert "cannot load the certificate" in refusal(node.ca, str(text), node.key)


def test_an_encrypted_key_is_refused_without_a_question(node: TlsFiles, tmp_path: Path) -> None:
    locked = str(tmp_path / "locked.key")
    command = ["openssl", "ec", "-in", node.key, "-aes256", "-passout", "pass:word", "-out", locked]
    subprocess.run(command, check=True, capture_output=True)
    assert "cannot load the certificate" in refusal(node.ca, node.cert, locked)
