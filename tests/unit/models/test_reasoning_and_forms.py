"""Forms of answers behind the reasoning of a model, as engines are asked for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.recorded_outputs import WHOLE, FamilyFile, FamilyModel, RecordedOutput

from dynamo.core.features import required_features
from dynamo.core.reply import Reply
from dynamo.core.text import TextOptions
from dynamo.core.values import EngineInfo, Finish, GenerateRequest, Started, StructuredOutput
from dynamo.models.answers.families import find_family


async def test_forms_of_foreign_engines_tell_where_reasoning_ends(
    tmp_path: Path, tiny_model: Path
) -> None:
    """An engine that would begin with the structured output is asked only where no reasoning goes before it."""
    engine = EngineInfo("vllm", 16, 64, 4096, 8, 4096, features=("structured",))
    name = "qwen3-hermes"
    family = FamilyFile(name, list(find_family(name).markers))
    model = FamilyModel(family, tmp_path, tiny_model / "tokenizer.json", engine)
    needs = list[Any]()

    async def send(request: GenerateRequest, context: Any, choice: Reply) -> None:
        needs.append(required_features(request))
        choice.begin(Started())
        choice.finish(Finish("stop"))

    options = TextOptions(structured=StructuredOutput("json_object"))
    for prompt in ("", "<think>\n"):
        output = RecordedOutput("test", name, "", [], [], generation_prompt=prompt)
        await model.parse(output, WHOLE, send=send, options=options)
    assert needs == [["structured"], ["structured", "form_after_reasoning"]]
