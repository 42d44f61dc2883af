"""The flags of `dynamo configure`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynamo.cli.benchmark.replay_flags import numbers, parse_promise
from dynamo.cli.parsing import Flag, Parser

MOST_TOKENS = 10_000_000
GOALS = ("throughput", "latency", "cost")
EXAMPLES = """\
  dynamo configure Qwen/Qwen3-32B --gpu h100_sxm --gpus 8 --good ttft=1s,tpot=30ms --out plan
  dynamo configure ./model --gpu h200_sxm --rate 12 --isl 4000 --osl 1000 --prefix 2000
  dynamo configure ./config.json --gpu b200_sxm --gpus 32 --engine vllm --trace trace.jsonl
  dynamo configure Qwen/Qwen3-32B --gpu h100_sxm --check plan/serve.yaml
  dynamo configure --rows silicon.csv --json predicted.json"""


def parser() -> Parser:
    """Return the parser: the model, the GPUs, the load, the promise, and the output."""
    parser = Parser(
        "dynamo configure",
        "Choose engine, parallelism, batch and the ratio of prefill to decode workers for a model "
        "on GPUs that need not be here, and write the configuration. Times are formulas with "
        "fitted constants, corrected by measured runs of AI Configurator's collection. Neither "
        "network nor GPU is used. `dynamo config` explains and checks a configuration.",
        EXAMPLES,
        usage="MODEL --gpu GPU (--gpus N | --rate N) [FLAGS] | --rows FILE.csv --json OUT",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a folder with a config.json, that file, or a known name",
    )
    parser.add_flags(FLAGS)
    return parser


FLAGS: Mapping[str, Sequence[Flag]] = {
    "hardware": (
        Flag("--gpu", "kind of GPU, such as h100_sxm", metavar="GPU"),
        Flag("--gpus", "GPUs that there are", 0, "N", numbers(int, 65_536)),
        Flag("--price", "USD a GPU hour (default: a list price)", 0.0, "USD", numbers(float, 1e4)),
    ),
    "model and engine": (
        Flag("--engine", "vllm, sglang, trtllm, or several; auto: all", "auto", "ENGINE"),
        Flag("--precision", "precision of the weights (default: as config.json says)", "", "NAME"),
        Flag("--kv-precision", "precision of the KV cache (default: both are tried)", "", "NAME"),
    ),
    "load": (
        Flag(
            "--rate",
            "requests a second to bear; without --gpus the fewest GPUs for it",
            0.0,
            "N",
            numbers(float, 1e6),
        ),
        Flag("--isl", "mean tokens of a prompt", 4000, "TOKENS", numbers(int, MOST_TOKENS)),
        Flag("--osl", "mean tokens of an answer", 1000, "TOKENS", numbers(int, MOST_TOKENS)),
        Flag(
            "--prefix",
            "tokens of a prompt that are cached (default: 0)",
            0,
            "TOKENS",
            numbers(int, MOST_TOKENS, zero=True),
        ),
        Flag("--trace", "take lengths, cached tokens and rate from a trace", metavar="FILE"),
        Flag("--trace-block-size", "tokens per hash id", 512, "TOKENS", numbers(int, 1e6)),
    ),
    "promise": (
        Flag("--good", "limits such as ttft=1s,tpot=30ms", metavar="LIMITS", parse=parse_promise),
        Flag("--goal", "what to make best within them", "throughput", choices=GOALS),
    ),
    "measurements": (
        Flag("--measured", "result of `dynamo bench` of this model, GPU and --engine on --gpus "
             "GPUs (or of --check FILE): corrects the predictions", metavar="BENCH.json"),
        Flag("--check", "predict this configuration or graph instead", metavar="FILE"),
        Flag("--rows", "predict rows in AI Configurator's columns", metavar="CSV"),
        Flag("--hide-combination", "with --rows: without measured rows of the same model, GPU, "
             "engine and precision", False),
    ),
    "output": (
        Flag("--out", "write the configuration, graph, picture and reasons", metavar="DIR"),
        Flag("--force", "write into a folder that is not empty", False),
        Flag("--json", "write the result as JSON (- prints it)", metavar="OUT"),
    ),
}  # fmt: skip
