"""Names the API of a path that this server does not have, and the path to use instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dynamo.core.errors import NotFound, nearest_name_hint

MAX_PATH_SHOWN = 100
ROOT = "/"

CHAT = "POST /v1/chat/completions"
COMPLETE = "POST /v1/completions"
EITHER = f"{COMPLETE}, or {CHAT} with the model's chat template"
EMBED = "POST /v1/embeddings"
RERANK = "POST /v1/rerank"
SCORE = "POST /v1/score"
MODELS = "GET /v1/models"
HEALTH = "GET /health"
AT_START = "`dynamo run MODEL`: models are chosen at the start"
NAMED_BY_ITS_END = ""

FOREIGN_PATHS: Mapping[str, Mapping[str, str]] = {
    "Ollama": {
        "/api/chat": CHAT,
        "/api/generate": EITHER,
        "/api/tags": MODELS,
        "/api/ps": MODELS,
        "/api/show": f"{MODELS}/MODEL",
        "/api/version": "GET /version",
        "/api/embed": EMBED,
        "/api/embeddings": EMBED,
        "/api/pull": AT_START,
        "/api/push": AT_START,
        "/api/create": AT_START,
        "/api/copy": AT_START,
        "/api/delete": AT_START,
        "/api/blobs/": AT_START,
    },
    "llama.cpp": {
        "/completion": COMPLETE,
        "/infill": COMPLETE,
        "/embedding": EMBED,
        "/embeddings": EMBED,
        "/reranking": RERANK,
        "/v1/reranking": RERANK,
        "/apply-template": "POST /tokenize",
        "/props": MODELS,
        "/slots": "GET /metrics",
        "/lora-adapters": "POST /v1/load_lora_adapter",
    },
    "TGI, SGLang or vLLM": {"/generate": EITHER},
    "TGI": {
        "/generate_stream": f"{EITHER}, with stream: true",
        "/info": MODELS,
        "/chat_tokenize": "POST /tokenize",
    },
    "SGLang": {
        "/get_model_info": MODELS,
        "/model_info": MODELS,
        "/get_server_info": MODELS,
        "/server_info": MODELS,
        "/health_generate": HEALTH,
        "/encode": EMBED,
    },
    "TEI": {"/embed": EMBED, "/embed_all": EMBED, "/similarity": SCORE},
    "vLLM, TEI or Jina": {"/rerank": RERANK, "/score": SCORE},
    "vLLM": {"/load": "GET /metrics", "/pooling": EMBED},
    "Cohere": {
        "/v1/chat": CHAT,
        "/v2/chat": CHAT,
        "/v1/generate": EITHER,
        "/v1/embed": EMBED,
        "/v2/embed": EMBED,
        "/v2/rerank": RERANK,
    },
    "Gemini": {
        "/v1beta/openai/": NAMED_BY_ITS_END,
        "/v1beta/": CHAT,
    },
    "Azure OpenAI": {"/openai/": NAMED_BY_ITS_END},
    "Amazon Bedrock": {"/model/": CHAT},
    "Amazon SageMaker": {"/invocations": CHAT, "/ping": HEALTH},
    "KServe and Triton": {
        "/v2/health/": HEALTH,
        "/v2/models": f"{MODELS} and {COMPLETE}",
        "/v2/models/": EITHER,
    },
    "LM Studio": {"/api/v0/": NAMED_BY_ITS_END},
    "KoboldCpp": {"/api/v1/generate": EITHER, "/api/v1/model": MODELS, "/api/extra/": EITHER},
    "Anthropic's older API": {"/v1/complete": "POST /v1/messages"},
    "OpenAI's older API": {"/v1/engines": f"{MODELS} and {COMPLETE}", "/v1/edits": CHAT},
    "Mistral": {"/v1/fim/completions": COMPLETE},
    "FastAPI": {
        "/docs": "GET / in a browser, which lists the routes",
        "/redoc": "GET / in a browser, which lists the routes",
        "/openapi.json": "GET / in a browser, which lists the routes",
    },
    "Kubernetes": {"/healthz": HEALTH, "/livez": "GET /live", "/readyz": "GET /ready"},
}
"""Paths by the API that has them, and what to use instead. A slash at the end begins a prefix."""
ABSENT = {
    "/v1/audio/": "speech and transcription",
    "/v1/images/": "generation of images",
    "/v1/videos": "generation of videos",
    "/v1/moderations": "moderation",
    "/v1/assistants": "assistants",
    "/v1/threads": "assistants",
    "/v1/conversations": "stored conversations",
    "/v1/realtime": "the Realtime API",
    "/v1/files": "uploaded files",
    "/v1/batches": "batches",
    "/v1/messages/batches": "batches",
    "/v1/fine_tuning/": "fine-tuning",
    "/v1/vector_stores": "vector stores",
}
"""Prefixes of OpenAI and Anthropic that this server does not have, and their names in errors."""
API_PREFIX = "/v1"
GEMINI_PREFIX = "/v1/models/"


def find_tail(path: str, known: Collection[str]) -> str:
    """Return the known path that ends like `path`; "" without one.

    Base URLs of clients have `/v1` twice or not at all, or the prefix of another server.
    """
    path = "/" + path.strip("/")
    while path:
        for candidate in (API_PREFIX + path, path):
            if candidate in known:
                return candidate
        _, slash, rest = path[1:].partition("/")
        path = slash + rest
    return ""


def not_found_error(method: str, path: str, known: Collection[str]) -> NotFound:
    """Return the error for a path that is not in `known`. Its hint names the path to use."""
    shown = path[:MAX_PATH_SHOWN]
    known = [route for route in known if route != ROOT]
    if path.strip("/") in ("", "v1"):
        return NotFound(f"there is no {method} {shown}", hint=f"known: {', '.join(known)}")
    for prefix, name in ABSENT.items():
        if path.startswith(prefix):
            return NotFound(f"{shown}: {name}: not supported", hint=f"known: {', '.join(known)}")
    tail = find_tail(shown, known)
    if (error := foreign_path_error(method, path, tail)) is not None:
        return error
    if tail:
        hint = f"did you mean {tail!r}? The base URL of an OpenAI client ends in /v1"
    else:
        hint = nearest_name_hint(shown, known, cutoff=0.5)
    return NotFound(f"there is no {method} {shown}", hint=hint)


def foreign_path_error(method: str, path: str, tail: str = "") -> NotFound | None:
    """Return the error for a path of another API, and None for a path of no API that is known here.
    `tail`: what the hint names where FOREIGN_PATHS has nothing."""
    plain = "/" + path.strip("/")
    apis = [
        (api, instead)
        for api, paths in FOREIGN_PATHS.items()
        for foreign, instead in paths.items()
        if plain == foreign or (foreign[-1] == "/" and plain.startswith(foreign))
    ]
    if plain.startswith(GEMINI_PREFIX) and ":" in plain.rpartition("/")[2]:
        apis.append(("Gemini", CHAT))
    if not apis:
        return None
    api, instead = apis[0]
    message = f"there is no {method} {path[:MAX_PATH_SHOWN]}, a path of {api}"
    return NotFound(message, hint=f"use {instead or tail or CHAT}")
