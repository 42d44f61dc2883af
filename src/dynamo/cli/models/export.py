"""`dynamo export`: write a model as a Hugging Face folder in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dynamo.cli.parsing import Parser

EXAMPLES = """\
  dynamo export ./smollm2                       the default model
  dynamo export ./folder ./model.gguf
  dynamo export ./smollm2 && dynamo run out=vllm ./smollm2"""


def parser() -> Parser:
    """Return the parser: the folder and the model."""
    parser = Parser(
        "dynamo export",
        "Write a model as a Hugging Face folder with float32 weights, for engines that read no "
        "GGUF file. Models of the Llama family.",
        EXAMPLES,
        usage="FOLDER [MODEL]",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to write")
    parser.add_argument(
        "model", nargs="?", default="", metavar="MODEL", help="default: the default model"
    )
    return parser


def run(arguments: Sequence[str]) -> int:
    """Write the model."""
    args = parser().parse(arguments)

    from dynamo.models.export import export_checkpoint
    from dynamo.models.resolve import resolve_model_blocking

    files = resolve_model_blocking(args.model)
    names = export_checkpoint(
        files.path, Path(files.tokenizer.path), files.metadata, args.folder.expanduser()
    )
    print(f"{files.name}: {len(names)} tensors in {args.folder}")
    return 0
