"""Downloads from the Hugging Face hub, through its client library and cache."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dynamo.core.errors import ModelUnavailable
from dynamo.core.installation import install_command

BETTER_MODELS = (("Qwen/Qwen3-4B", 20e9), ("Qwen/Qwen3-1.7B", 9e9), ("Qwen/Qwen3-0.6B", 4e9))
"""Models that know more than the default one, and the free memory that each needs in float32."""
ANSWER_TIMEOUT_S = 10.0
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_METADATA_PATTERNS = ["*.json", "*.jinja"]
_IGNORED_PATTERNS = ["original/*", "onnx/*", "*/*.json"]


def is_hub_name(spec: str) -> bool:
    """Whether `spec` has the form `model` or `organisation/model`."""
    return _HUB_NAME.fullmatch(spec) is not None and not spec.startswith(".")


def has_hub_library() -> bool:
    """Whether the library that fetches models of the hub is installed."""
    return find_spec("huggingface_hub") is not None


def check_hub_library(name: str) -> None:
    """Raise `ModelUnavailable` if the library that fetches the hub model `name` is missing."""
    if not has_hub_library():
        raise ModelUnavailable(
            f"there is no file or folder {name}, and a model of the hub needs the library "
            "huggingface_hub, which is not installed",
            hint=install_command("hub"),
        )


def folder_patterns(*, with_weights: bool) -> list[str]:
    """Return the patterns of the files of a model folder."""
    return [*_METADATA_PATTERNS, "*.safetensors"] if with_weights else _METADATA_PATTERNS


def fetch_hub_model(name: str, with_weights: bool) -> Path:
    """Return the folder of a hub model, fetched or cached. Raises as `fetch_files`."""
    return Path(fetch_files(name, folder_patterns(with_weights=with_weights)))


def fetch_files(name: str, patterns: list[str], **options: Any) -> Any:
    """Return the folder of a repository with the files that `patterns` name.

    The client resumes downloads and shows progress bars. Raises `ModelUnavailable`.
    """
    from huggingface_hub import snapshot_download

    options |= {"allow_patterns": patterns, "ignore_patterns": _IGNORED_PATTERNS}
    with _explained_errors(name):
        return snapshot_download(name, **options)


def list_files(name: str) -> list[str]:
    """Return the names of a repository's files. Raises `ModelUnavailable`."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    with _explained_errors(name):
        try:  # not `list_repo_files`, which asks an unreachable hub six times within 23 s
            info = HfApi().model_info(name, timeout=ANSWER_TIMEOUT_S)
        except HfHubHTTPError:
            raise
        except Exception as error:  # the hub has not answered
            raise LocalEntryNotFoundError(str(error)) from error
        return [file.rfilename for file in info.siblings or ()]


@contextmanager
def _explained_errors(name: str) -> Iterator[None]:
    """Raise the errors of the client as `ModelUnavailable`."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise ModelUnavailable(
            f"{name} is gated", hint="accept its licence on the hub and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelUnavailable(
            f"there is no file, folder or hub model {name!r}",
            hint="check the spelling; a private model needs HF_TOKEN",
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelUnavailable(
            f"there is no file or folder {name!r}, and the hub cannot be reached",
            hint="check the network, or give the path of a model folder or GGUF file",
        ) from error
    except Exception as error:
        raise ModelUnavailable(
            f"{name} cannot be fetched from the hub: {error}",
            hint="check the network and the free disk space, and repeat the command: it resumes",
        ) from error
