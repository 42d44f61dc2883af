"""`dynamo configure`: choose and write a configuration for GPUs that need not be here."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dynamo.cli.foresight.configure_flags import parser
from dynamo.cli.parsing import (
    EXIT_INTERRUPTED,
    check_writable,
    format_table,
    write_file,
    write_json,
)
from dynamo.core.errors import ConfigError, Unsupported

if TYPE_CHECKING:
    from dynamo.operations.configure.catalogue import EngineFacts
    from dynamo.operations.configure.finalists import Replayed
    from dynamo.operations.configure.plans import Plan, Question, Workers
    from dynamo.operations.configure.predictor import Predictor
    from dynamo.operations.configure.search import SearchResult

SHOWN = 10
PICTURE = "pareto.png"


def run(arguments: Sequence[str]) -> int:
    """Search, predict rows, or check a configuration. Returns 1 if nothing keeps the promise."""
    args = parser().parse(arguments)
    check_writable(args.json)
    if args.rows:
        return _predict_rows(args)
    question, predictor = _question(args)
    if args.check:
        return _check(args, question, predictor)
    if not (question.gpus or question.rate):
        raise ConfigError("how many GPUs are there, or how many requests?", hint="--gpus or --rate")
    if args.out:
        check_folder(Path(args.out), force=args.force)

    from dynamo.operations.configure.report import explain_failure
    from dynamo.operations.configure.search import Search

    result = Search(question, predictor).run()
    if not result.plans and result.interrupted:
        print("interrupted before a plan was found", file=sys.stderr)
        return EXIT_INTERRUPTED
    if not result.plans:
        text, hint = explain_failure(result, question)
        print(f"{text}\nhint: {hint}", file=sys.stderr)
        return 1
    if args.json != "-":
        _print_found(result, question)
    replayed: list[Replayed] = []
    if not result.interrupted:
        try:
            replayed.extend(replay_finalists(result, question, predictor))
        except KeyboardInterrupt:
            result = msgspec.structs.replace(result, interrupted=True)
            print("interrupted: not all finalists were replayed", file=sys.stderr)
    if args.json:
        write_json(args.json, {"plans": result.plans, "replayed": replayed})
    if args.out:
        _write_files(args, result, question, replayed, predictor)
    return EXIT_INTERRUPTED if result.interrupted else 0


def _predict_rows(args: argparse.Namespace) -> int:
    """Predict the rows of a file. Returns 1 if some cannot be read."""
    from dynamo.operations.configure.predictor import Predictor, predict_rows

    if not args.json:
        raise ConfigError("--rows needs a file for its predictions", hint="--json OUT, or --json -")
    results = predict_rows(
        Path(args.rows), Predictor.shipped(), hide_combination=args.hide_combination
    )
    write_json(args.json, results)
    failed = [row for row in results if "error" in row]
    if failed:
        print(f"{len(failed)} of {len(results)} rows: {failed[0]['error']}", file=sys.stderr)
    elif args.json != "-":
        print(f"{len(results)} rows predicted")
    return 1 if failed else 0


def _question(args: argparse.Namespace) -> tuple[Question, Predictor]:
    """Return what the flags ask, and the predictor with the user's measured rows."""
    from dynamo.operations.configure.catalogue import find_gpu, find_model, gpus
    from dynamo.operations.configure.plans import Question
    from dynamo.operations.configure.shapes import KV_BYTES, WEIGHT_BYTES

    if not args.model:
        raise ConfigError("which model?", hint="MODEL is a folder, a config.json or a known name")
    if not args.gpu:
        raise ConfigError("which GPU?", hint=f"--gpu {', '.join(gpus())}")
    shape = find_model(args.model)
    if args.precision:
        shape = shape.with_precision(_known("--precision", args.precision, WEIGHT_BYTES))
    load = trace_load(args) if args.trace else (args.isl, args.osl, args.prefix, args.rate)
    isl, osl, prefix, rate = load
    if prefix >= isl:
        raise ConfigError(
            f"{prefix} cached tokens of a prompt of {isl}", hint="--prefix is less than --isl"
        )
    if shape.context_tokens and isl + osl > shape.context_tokens:
        raise ConfigError(
            f"{isl} + {osl} tokens exceed the context of {shape.name}, {shape.context_tokens}",
            hint="shorter --isl or --osl",
        )
    promise = args.good
    kv = _known("--kv-precision", args.kv_precision, KV_BYTES) if args.kv_precision else ""
    question = Question(
        shape=shape,
        gpu=find_gpu(args.gpu),
        engines=_engines(args.engine),
        isl=isl,
        osl=osl,
        prefix=prefix,
        gpus=args.gpus,
        rate=rate,
        ttft_ms=(promise and promise.ttft_ms) or math.inf,
        tpot_ms=(promise and promise.itl_ms) or math.inf,
        goal=args.goal,
        kv_precision=kv,
    )
    return question, _predictor(args, question)


def _predictor(args: argparse.Namespace, question: Question) -> Predictor:
    from dynamo.operations.configure.checking import measured_row
    from dynamo.operations.configure.predictor import Predictor

    rows = []
    if args.measured:
        workers = _read_checked(args, question) if args.check else None
        rows.append(measured_row(args.measured, question, workers))
    return Predictor.shipped(rows, question.shape)


def _known(flag: str, name: str, known: dict[str, float]) -> str:
    if name not in known:
        raise ConfigError(f"{flag} {name} is unknown", hint=f"one of {', '.join(known)}")
    return name


def _engines(text: str) -> tuple[EngineFacts, ...]:
    from dynamo.operations.configure.catalogue import engines, find_engine

    if text == "auto":
        return tuple(engines().values())
    return tuple(find_engine(name) for name in text.split(","))


def trace_load(args: argparse.Namespace) -> tuple[int, int, int, float]:
    """Return mean prompt, answer and cached tokens of a trace, and its rate: that of the flags if
    they tell one, or the number of GPUs."""
    from dynamo.operations.replay.trace import ArrivalOptions, read_trace

    conversations = read_trace(args.trace, ArrivalOptions())
    requests = [request for conversation in conversations for request in conversation.requests]
    seen: set[int] = set()
    cached = 0
    for request in requests:
        known = sum(block in seen for block in request.block_ids)
        cached += min(known * args.trace_block_size, request.prompt_tokens - 1)
        seen.update(request.block_ids)
    span_s = max(conversation.start_s for conversation in conversations)
    count = len(requests)
    rate = args.rate
    if not rate and not args.gpus:
        if not span_s:
            raise ConfigError(f"{args.trace} has no span of time", hint="--rate or --gpus")
        rate = count / span_s
    return (
        max(1, round(sum(request.prompt_tokens for request in requests) / count)),
        max(1, round(sum(request.output_tokens for request in requests) / count)),
        round(cached / count),
        rate,
    )


def check_folder(folder: Path, *, force: bool) -> None:
    """Raise `ConfigError` unless files may be written to `folder`."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is no folder", hint="--out DIR")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise ConfigError(f"{folder} is not empty", hint="--force writes into it all the same")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {folder}: {error.strerror}") from None


def _print_found(result: SearchResult, question: Question) -> None:
    from dynamo.operations.configure.report import promise_text, table_rows

    shape = question.shape
    print(
        f"{shape.name}: {shape.weights / 1e9:.1f} billion weights in {shape.precision}, "
        f"{question.isl} + {question.osl} tokens, {promise_text(question)}, {question.gpu.name}"
    )
    if result.interrupted:
        print("interrupted: not all layouts were looked at")
    print("\n".join(format_table(table_rows(result.plans[:SHOWN]))))


def replay_finalists(
    result: SearchResult, question: Question, predictor: Predictor
) -> Iterator[Replayed]:
    """Replay the best plan of each kind, and its workers as flexible ones."""
    from dynamo.operations.configure.finalists import replay_plan

    for kind in ("aggregated", "disaggregated"):
        best = next((plan for plan in result.plans if plan.kind == kind), None)
        if best is None:
            continue
        yield replay_plan(best, question, predictor)
        if best.prefill_layout is None and best.replicas > 1:
            yield replay_plan(best, question, predictor, flexible=True)


def _write_files(
    args: argparse.Namespace,
    result: SearchResult,
    question: Question,
    replayed: Sequence[Replayed],
    predictor: Predictor,
) -> None:
    from dynamo.operations.configure import files
    from dynamo.operations.configure.finalists import step_timing
    from dynamo.operations.configure.report import draw_pareto, plan_name, why_text
    from dynamo.operations.configure.yaml_files import write_yaml

    best: Plan = result.plans[0]
    folder = Path(args.out)
    model = str(Path(args.model).resolve()) if Path(args.model).exists() else args.model
    model = str(Path(model).parent) if model.endswith(".json") else model
    graph = "agg" if best.prefill_layout is None else "disagg"
    notes = [
        f"{plan_name(best)} of {best.layout.engine} on {question.gpu.name}, by `dynamo configure`.",
        "`dynamo run -f serve.yaml` serves it here.",
        f"With the graphs of the repository: `dynamo serve graphs.{graph}:Frontend -f serve.yaml`.",
    ]
    texts = {
        "serve.yaml": write_yaml(files.serve_settings(best, question, model), notes),
        "compose.yaml": write_yaml(files.compose_file(best, question, model), notes[:1]),
        "graph.yaml": write_yaml(files.graph_file(best, question, model, "configured"), notes[:1]),
        "why.md": why_text(result, question, replayed, args.price or question.gpu.hourly),
    }
    for name, text in texts.items():
        write_file(folder / name, text.encode())
    written = [*texts]
    for prefill in (False, True) if best.prefill_layout else (False,):
        name = "prefill-timing.json" if prefill else "timing.json"
        write_json(folder / name, step_timing(best, question, predictor, prefill=prefill))
        written.append(name)
    try:
        draw_pareto(result, question, str(folder / PICTURE))
        written.append(PICTURE)
    except Unsupported as error:
        print(f"note: no {PICTURE}: {error.message}; {error.hint}", file=sys.stderr)
    except OSError as error:
        raise ConfigError(f"cannot write {folder / PICTURE}: {error.strerror}") from None
    if args.json != "-":
        print(f"written to {folder}: {', '.join(written)}")


def _check(args: argparse.Namespace, question: Question, predictor: Predictor) -> int:
    """Predict a given configuration. Returns 1 if it breaks the promise."""
    from dynamo.operations.configure.checking import predict_plan
    from dynamo.operations.configure.report import promise_text, table_rows

    plan = predict_plan(_read_checked(args, question), question, predictor)
    if args.json:
        write_json(args.json, plan)
    if args.json != "-":
        print("\n".join(format_table(table_rows([plan]))))
    if plan.misses(question) <= 1:
        return 0
    print(f"these workers do not keep {promise_text(question)} at any batch", file=sys.stderr)
    return 1


def _read_checked(args: argparse.Namespace, question: Question) -> Workers:
    from dynamo.operations.configure.checking import read_configuration
    from dynamo.services.deployment.model_groups import worker_groups

    return read_configuration(Path(args.check), question, worker_groups)
