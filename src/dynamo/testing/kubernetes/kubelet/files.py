"""The surroundings of a container: its command, environment and mounted folders."""

from __future__ import annotations

import base64
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dynamo.communication.kubernetes.link import ACCOUNT_FOLDER, ACCOUNT_FOLDER_VARIABLE
from dynamo.testing.kubernetes.kinds import Object
from dynamo.testing.kubernetes.selectors import get_path
from dynamo.testing.kubernetes.store import ClusterStore

_VARIABLE = re.compile(r"\$(\$|\(([\w.-]+)\))")
_SELF = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")


class LaunchError(Exception):
    """A container cannot start. `reason` is that of its waiting state."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Launch(NamedTuple):
    """A process to start."""

    command: list[str]
    env: dict[str, str]
    folder: Path


class PodFiles:
    """The folders of a pod, below one that is removed with it. `account` has the files of the
    service account, and `claims` the folders of volume claims."""

    def __init__(
        self, store: ClusterStore, folder: Path, claims: Path, address: str,
        account: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._store = store
        self._claims = claims
        self._address = address
        self.folder = folder
        for name in ("tmp", "logs", "volumes", "run"):
            (folder / name).mkdir(mode=0o700, parents=True)
        self._account = folder / "account"
        _write_files(self._account, {name: text.encode() for name, text in account.items()})

    def remove(self) -> None:
        """Remove all folders but those of claims."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def write_volumes(self, pod: Object) -> None:
        """Write the files of ConfigMaps and Secrets as they are now. Raises `LaunchError`."""
        for volume in pod["spec"].get("volumes") or ():
            folder = self._place(volume)
            folder.mkdir(parents=True, exist_ok=True)
            sources = (volume.get("projected") or {}).get("sources") or [volume]
            for source in sources:
                _write_files(folder, self._content(pod, source))

    def launch(self, pod: Object, container: Object, base: Mapping[str, str]) -> Launch:
        """Return the process of a container, under the variables of `base` and its own. Raises
        `LaunchError`."""
        volumes = {v["name"]: self._place(v) for v in pod["spec"].get("volumes") or ()}
        places = {ACCOUNT_FOLDER: self._account}
        for mount in container.get("volumeMounts") or ():
            place = volumes[mount["name"]] / mount.get("subPath", "")
            places[mount["mountPath"].rstrip("/")] = place
        env = {
            **base, "HOME": str(self.folder), "TMPDIR": str(self.folder / "tmp"),
            "XDG_RUNTIME_DIR": str(self.folder / "run"),
            ACCOUNT_FOLDER_VARIABLE: str(self._account),
        }  # fmt: skip
        for name, text in self._environment(pod, container):
            env[name] = self._localise(_expand(text, env), places)
        words = [*(container.get("command") or ["dynamo", "run"]), *(container.get("args") or ())]
        command = [self._localise(_expand(word, env), places) for word in words]
        if shutil.which(command[0], path=env["PATH"]) is None:
            text = f'exec: "{command[0]}": executable file not found in $PATH'
            raise LaunchError("RunContainerError", text)
        folder = Path(self._localise(container.get("workingDir") or "", places) or self.folder)
        return Launch(command, env, folder if folder.is_dir() else self.folder)

    def _place(self, volume: Object) -> Path:
        if claim := volume.get("persistentVolumeClaim"):
            return self._claims / str(claim["claimName"])
        return self.folder / "volumes" / str(volume["name"])

    def _localise(self, text: str, places: Mapping[str, Path]) -> str:
        """Return a text with the folders of mounts for their paths, and the pod's address for all
        addresses. A longer path that exists on this host is that of the image."""
        for path in sorted(places, key=len, reverse=True):

            def place(match: re.Match[str], path: str = path) -> str:
                if match[1] and Path(match[0]).exists():
                    return match[0]
                return f"{places[path]}{match[1]}"

            pattern = rf"(?<![\w/.-]){re.escape(path)}((?:/[^\s\"',;:]*)?)(?![\w.-])"
            text = re.sub(pattern, place, text)
        return text.replace("0.0.0.0", self._address)

    def _environment(self, pod: Object, container: Object) -> Iterator[tuple[str, str]]:
        for source in container.get("envFrom") or ():
            for name, data in self._content(pod, source, in_environment=True).items():
                yield f"{source.get('prefix', '')}{name}", data.decode(errors="surrogateescape")
        for variable in container.get("env") or ():
            source = variable.get("valueFrom")
            text = variable.get("value", "") if not source else self._value(pod, source)
            if text is not None:
                yield variable["name"], text

    def _value(self, pod: Object, source: Object) -> str | None:
        if field := source.get("fieldRef"):
            return self._field(pod, field["fieldPath"])
        reference = source.get("configMapKeyRef") or source.get("secretKeyRef")
        if reference is None:
            return None
        content = self._content(pod, source, in_environment=True)
        if reference["key"] in content:
            return content[reference["key"]].decode(errors="surrogateescape")
        if reference.get("optional"):
            return None
        where = f"{pod['metadata']['namespace']}/{reference['name']}"
        text = f"couldn't find key {reference['key']} in {where}"
        raise LaunchError("CreateContainerConfigError", text)

    def _field(self, pod: Object, path: str) -> str:
        if path in ("status.podIP", "status.podIPs", "status.hostIP"):
            return self._address
        if match := _SELF.fullmatch(path):
            return str((pod["metadata"].get(match[1]) or {}).get(match[2], ""))
        return str(get_path(pod, f".{path}") or "")

    def _content(
        self, pod: Object, source: Object, *, in_environment: bool = False
    ) -> dict[str, bytes]:
        """Return the data of the ConfigMap or Secret that a source refers to."""
        files: dict[str, bytes] = {}
        for item in (source.get("downwardAPI") or {}).get("items") or ():
            files[item["path"]] = self._field(pod, item["fieldRef"]["fieldPath"]).encode()
        for field, reference in source.items():
            kind = "configmap" if field.startswith("configMap") else "secret"
            if not field.startswith(("configMap", "secret")):
                continue
            wanted = reference.get("name") or reference.get("secretName", "")
            stored = self._store.get(f"{kind}s", (pod["metadata"]["namespace"], wanted))
            if stored is not None:
                files |= _select(_data(stored), reference.get("items"))
            elif not reference.get("optional"):
                reason = "CreateContainerConfigError" if in_environment else "ContainerCreating"
                raise LaunchError(reason, f'{kind} "{wanted}" not found')
        return files


def _data(item: Object) -> dict[str, bytes]:
    texts = item.get("data") or {}
    if item["kind"] == "Secret":
        return {name: base64.b64decode(text) for name, text in texts.items()}
    binary = {k: base64.b64decode(v) for k, v in (item.get("binaryData") or {}).items()}
    return {name: str(text).encode() for name, text in texts.items()} | binary


def _select(data: dict[str, bytes], items: Any) -> dict[str, bytes]:
    if not items:
        return data
    return {item["path"]: data[item["key"]] for item in items if item["key"] in data}


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        path = folder / name
        if path.exists() and path.read_bytes() == data:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        new.touch(mode=0o600)
        new.write_bytes(data)
        new.replace(path)


def _expand(text: str, env: Mapping[str, str]) -> str:
    """Return a text with `$(NAME)` replaced, as far as the variable exists."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[1] == "$" else env.get(match[2], match[0])

    return _VARIABLE.sub(value, text)
