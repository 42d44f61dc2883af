# /// script
# requires-python = ">=3.11"
# dependencies = ["lm-eval[api]==0.4.13"]
# ///
"""lm-eval's `local-completions`, with tasks of its own and the server's tokenizer."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from cases import NATIVE_URL, raised, run

FOLDER = tempfile.TemporaryDirectory()
os.environ |= {"HF_HOME": FOLDER.name, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import lm_eval  # noqa: E402 - reads these variables

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Egypt": "Cairo"}
MODEL: Any = {"base_url": f"{NATIVE_URL}/v1/completions", "model": "default"}


def evaluate(task: Any, model: Any = MODEL) -> dict[str, Any]:
    """Return the results of a task about capitals."""
    path = Path(FOLDER.name) / "capitals.jsonl"
    cities = list(CAPITALS.values())
    rows = (
        {"country": country, "cities": cities, "label": number}
        for number, country in enumerate(CAPITALS)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "task": "capitals",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(path)},
        "test_split": "train",
        "doc_to_text": "The capital of {{country}} is",
    }
    answer: Any = lm_eval.simple_evaluate(
        model="local-completions", model_args=model, tasks=[common | task], bootstrap_iters=0
    )
    return dict(answer["results"]["capitals"])


def score() -> None:
    """The logprobs of prompts choose among answers."""
    task = {
        "output_type": "multiple_choice",
        "doc_to_choice": "cities",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    }
    results = evaluate(task)
    assert results["acc,none"] >= 0.75, results


def generate() -> None:
    task = {
        "output_type": "generate_until",
        "doc_to_target": "{{cities[label]}}",
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 8},
        "metric_list": [{"metric": "contains", "aggregation": "mean", "higher_is_better": True}],
        "process_results": lambda doc, answers: {
            "contains": float(doc["cities"][doc["label"]] in answers[0])
        },
    }
    results = evaluate(task)
    assert results["contains,none"] >= 0.5, results


def error() -> None:
    task = {"output_type": "generate_until", "doc_to_target": "cities"}
    raised(Exception, lambda: evaluate(task, MODEL | {"model": "nobody", "max_retries": 1}))


if __name__ == "__main__":
    run(score, generate, error)
