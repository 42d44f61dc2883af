"""Removal of credentials from text that users, logs and pages show.

A process remembers its secrets here. Errors, logs and health write `***` in their place, also where
another server has sent them back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, unquote

REDACTED = "***"
MIN_SECRET_CHARACTERS = 6
"""A shorter secret is not searched for in text: it would be found in ordinary words."""
_SECRET_NAME = re.compile(r"(?i)(^|[_.-])(token|keys?|secret|password|credentials?)$")
_URL_REST = re.compile(r"[^\s'\"]*")
_USER_INFO = re.compile(r"(?:://|,)([^\s'\"/,]+)@")
_QUOTED = re.compile(r"%[0-9A-F]{2}")
_CREDENTIALS = re.compile(r"(?:^|(?<=,))[^,]*@")

_secrets: list[str] = []
"""Every form of the secrets of this process, the longest first."""


def remember_secrets(secrets: Iterable[str]) -> None:
    """Redact these texts from now on, as they are and as JSON and URLs write them."""
    forms = {
        form
        for secret in secrets
        if len(secret) >= MIN_SECRET_CHARACTERS
        for form in _written_forms(secret)
    }
    if not forms.issubset(_secrets):
        _secrets[:] = sorted(forms.union(_secrets), key=len, reverse=True)


def _written_forms(secret: str) -> set[str]:
    """Return a secret as it is, and as programs write it in URLs and JSON."""
    quoted = {quote(secret, safe=safe, errors="surrogateescape") for safe in ("", "/")}
    quoted |= {_QUOTED.sub(lambda code: code[0].lower(), form) for form in quoted}
    escaped = {json.dumps(secret, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False)}
    return {secret, *quoted, *escaped, *(form.replace("/", r"\/") for form in escaped)}


def remember_credentials(value: Any) -> None:
    """Remember what `redact_credentials` hides: passwords and tokens of URLs in a text, a list or
    a mapping, and the values under the names of secrets in a mapping."""
    if isinstance(value, str):
        if "@" in value and "://" in value:
            passwords = [user.rpartition(":")[2] for user in _USER_INFO.findall(value)]
            remember_secrets((*passwords, *map(unquote, passwords)))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(item, str) and _SECRET_NAME.search(str(key)):
                remember_secrets((item,))
            else:
                remember_credentials(item)
    elif isinstance(value, list | tuple):
        for item in value:
            remember_credentials(item)


def remember_environment(environ: Mapping[str, str]) -> None:
    """Remember secrets of variables such as HF_TOKEN. The settings know those of `DYNAMO_...`."""
    remember_credentials(
        {name: text for name, text in environ.items() if not name.startswith("DYNAMO_")}
    )


def redact(text: str, *secrets: str) -> str:
    """Replace the secrets of this process, other `secrets`, and the credentials of URLs."""
    for secret in (*secrets, *_secrets) if secrets else _secrets:
        if secret and secret in text:
            text = text.replace(secret, REDACTED)
    return redact_urls(text)


def redact_urls(text: str) -> str:
    """Replace user, password or token of every URL in `text`: `nats://***@host`.

    Every host of a list such as `etcd://user:word@host,user:word@host` is redacted. The time is
    linear in the length of `text`.
    """
    if "@" not in text or "://" not in text:
        return text
    head, *rests = text.split("://")
    return "://".join([head, *(_URL_REST.sub(_redact_userinfo, rest, 1) for rest in rests)])


def redact_credentials(value: Any) -> Any:
    """Redact the URLs in a value of the settings: a text, or a list or mapping that holds texts. In
    a mapping, such as the arguments of an engine, the value of a name like `hf_token` is hidden."""
    if isinstance(value, str):
        return redact_urls(value)
    if isinstance(value, Mapping):
        return {
            key: REDACTED if item and _SECRET_NAME.search(str(key)) else redact_credentials(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(redact_credentials(item) for item in value)
    return value


def _redact_userinfo(url_rest: re.Match[str]) -> str:
    return _CREDENTIALS.sub(f"{REDACTED}@", url_rest[0])
