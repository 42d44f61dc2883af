"""Render conversations with real chat templates by transformers, for the tests of `ChatTemplate`.

    python scripts/template_oracle.py [TEMPLATES]

Needs transformers (the `oracle` extra). TEMPLATES has files NAME.jinja; the default is
tests/data/templates, where prompts.json.gz is written. transformers gets each conversation as its
documentation says: arguments of calls are objects. The tables below name the templates that read
another form, by their own source.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent.parent / "tests" / "data" / "templates"
TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
TEXT_ARGUMENTS = (
    "DeepSeek-R1-Distill-Llama-8B",
    "functionary-medium-v3.2",
)
"""Templates that join arguments as text."""
EMPTY_CONTENT = (
    "Bielik-11B-v3.0", "Devstral-Small-2507", "GLM-4.6", "GLM-4.7-Flash", "LFM2.5-8B",
    "MiniMax-M2", "Ministral-3-14B", "Phi-3.5-mini", "QwQ-32B", "Qwen3-0.6B", "gpt-oss-120b",
    "granite-3.3", "llm-jp-4.1",
)  # fmt: skip
"""Templates that fail on a message whose content is null, or write "None" for it."""
SHORT_IDS = ("Mistral-Small-3.2", "Mistral-Nemo")
"""Templates that want ids of nine letters and digits."""
READS_PARTS = (
    "Apriel-1", "Devstral-Small-2507", "GLM-4", "Kimi-K2", "LFM2.5-8B", "MiniMax-M", "Ministral-3",
    "Mistral-Small-3.2", "Qwen3.5", "StepFun3.5", "gemma-4", "granite-4", "Hy3",
)  # fmt: skip
"""Templates that read contents that are lists of parts. Others fail on them or write the list."""
NO_TOOLS = ("DeepSeek-R1-Distill", "DeepSeek-V3.1", "Phi-3.5", "SmolLM3", "gemma-2")
"""Templates in which tools do not occur. The system message describes them then."""
SYSTEM, USER = ({"role": role, "content": f"I am the {role}."} for role in ("system", "user"))
ANSWER = {"role": "assistant", "content": "Fine."}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather <now> of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Ort, z. B. Zürich"}},
            "required": ["city"],
        },
    },
}


def conversations() -> dict[str, dict[str, Any]]:
    """Return the requests by name. Contents and arguments are as clients send them."""
    arguments = '{"city": "Zürich", "days": [1, 2], "exact": true}'
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "call12345", "type": "function", "function": function}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {
        "role": "tool",
        "tool_call_id": "call12345",
        "name": "get_weather",
        "content": "18 °C",
    }
    parts = [{"type": "text", "text": text} for text in ("First part.", "Second part.")]
    return {
        "plain": {"messages": [USER]},
        "system": {"messages": [SYSTEM, USER]},
        "turns": {"messages": [SYSTEM, USER, ANSWER, USER]},
        "tools": {"messages": [SYSTEM, USER], "tools": [TOOL]},
        "result": {"messages": [USER, called, result], "tools": [TOOL]},
        "after": {"messages": [USER, called, result, ANSWER, USER], "tools": [TOOL]},
        "parts": {"messages": [{"role": "user", "content": parts}]},
        "part": {"messages": [{"role": "user", "content": parts[:1]}]},
    }


def rendered(source: str, name: str, request: dict[str, Any]) -> str | None:
    """Return the prompt by transformers; None where the template refuses the conversation."""
    from transformers.utils.chat_template_utils import render_jinja_template

    if "tools" in request and name.startswith(NO_TOOLS):
        return None
    messages = [read_form(message, name) for message in request["messages"]]
    try:
        [prompts, _] = render_jinja_template(
            conversations=[messages],
            tools=request.get("tools"),
            chat_template=source,
            add_generation_prompt=True,
            **TOKENS,
        )
    except Exception as error:
        print(f"{name}: {error}", file=sys.stderr)
        return None
    return str(prompts[0])


def read_form(message: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a message as transformers' documentation and the template's source want it."""
    message = json.loads(json.dumps(message))
    if message["content"] is None and name.startswith(EMPTY_CONTENT):
        message["content"] = ""
    if isinstance(message["content"], list) and not name.startswith(READS_PARTS):
        message["content"] = "\n".join(part["text"] for part in message["content"])
    if not name.startswith(TEXT_ARGUMENTS):
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return message


def main() -> None:
    """Write prompts.json.gz."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA
    requests = conversations()
    prompts = {
        path.stem: {
            case: rendered(path.read_text(), path.stem, request)
            for case, request in requests.items()
        }
        for path in sorted(folder.glob("*.jinja"))
    }
    import transformers

    about = {"made_by": f"transformers {transformers.__version__}", "tokens": TOKENS}
    text = json.dumps(
        {"about": about, "requests": requests, "prompts": prompts}, ensure_ascii=False
    )
    (folder / "prompts.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
