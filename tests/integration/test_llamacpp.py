"""Real llama.cpp with the default model: its answers through the engine, and as a deployment."""

from __future__ import annotations

import re
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest
from msgspec.structs import replace
from tests.conftest import Deployment
from tests.support.gguf import gguf_bytes

from dynamo.core.clock import SystemClock
from dynamo.core.codec import pack_ids, unpack_ids
from dynamo.core.errors import ConfigError, InvalidRequest, ModelUnavailable, Unsupported
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.values import (
    Finish,
    GenerateRequest,
    SamplingParams,
    StopConditions,
    StructuredOutput,
)
from dynamo.inference.engine_registry import EngineInputs
from dynamo.inference.llamacpp.engine import LlamaCppEngine, open_engine
from dynamo.inference.llamacpp.server import ServerSizes, default_sampling, open_server, plan_sizes
from dynamo.models.checkpoint.gguf import GgufFile
from dynamo.models.resolve import resolve_model_blocking
from dynamo.models.tokenization.tokenizer import load_tokenizer
from dynamo.testing.fakes import CollectedReply
from dynamo_conformance.engines import ENGINE_CONTEXT

QUESTION = "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n"
IM_END = 2
VOCABULARY = 49152
Q4_K, Q6_K = 12, 14
GREEDY = SamplingParams(temperature=0)


@pytest.fixture
async def engine() -> AsyncIterator[LlamaCppEngine]:
    files = resolve_model_blocking("")
    engine = LlamaCppEngine(
        files.path,
        ServerSizes(slots=2, context_tokens=512),
        vocab_size=VOCABULARY,
        eos_token_ids=(IM_END,),
    )
    await engine.start()
    yield engine
    await engine.stop()


def request(
    ids: Sequence[int] = tuple(range(300, 380)),
    sampling: SamplingParams = GREEDY,
    **stops: object,
) -> GenerateRequest:
    conditions = {"max_tokens": 6, "ignore_eos": True} | stops
    return GenerateRequest("r", "m", pack_ids(ids), sampling, StopConditions(**conditions))


async def answer(engine: LlamaCppEngine, request: GenerateRequest) -> CollectedReply:
    reply = CollectedReply()
    await engine.generate(request, ENGINE_CONTEXT, reply)
    return reply


async def test_the_end_of_an_answer_is_a_stop_token(engine: LlamaCppEngine) -> None:
    sampling = replace(GREEDY, logit_bias={IM_END: 100.0})
    ended = await answer(engine, request(sampling=sampling, ignore_eos=False))
    assert (ended.ids, ended.end) == ([], Finish("stop", 1, IM_END))
    reply = await answer(engine, request())
    stop_id = reply.ids[2]
    stopped = await answer(engine, request(stop_token_ids=(stop_id,)))
    assert stopped.end is not None
    assert (stopped.ids, stopped.end.stop_token) == (reply.ids[:2], stop_id)


async def test_an_answer_has_the_form_of_the_request(engine: LlamaCppEngine) -> None:
    tokenizer = load_tokenizer(resolve_model_blocking("").tokenizer)
    for structured, pattern in (
        (StructuredOutput("choice", '["violet", "ochre"]'), "violet|ochre"),
        (StructuredOutput("grammar", 'root ::= "v" [0-9]+ "."'), r"v\d+\."),
        (StructuredOutput("json_schema", '{"enum": ["ochre"]}'), '"ochre" ?'),
    ):
        base = request(unpack_ids(tokenizer.encode(QUESTION)), max_tokens=200, ignore_eos=False)
        reply = await answer(engine, replace(base, structured=structured))
        assert re.fullmatch(pattern, tokenizer.decode(reply.ids)), structured
        assert reply.end is not None
        assert reply.end.reason == "stop"


async def test_a_prefix_is_reused_by_its_tenant_only(engine: LlamaCppEngine) -> None:
    cached = []
    for salt in ("", "", "other", "other", ""):
        reply = await answer(engine, replace(request(), salt=salt))
        assert reply.started is not None
        cached.append(reply.started.cached_tokens)
    assert cached[0] == cached[2] == 0
    assert min(cached[1], cached[3], cached[4]) >= 70


async def test_seeds_repeat_and_differ(engine: LlamaCppEngine) -> None:
    sampling = SamplingParams(temperature=1.5, top_p=1.0, top_k=0, seed=7)
    await answer(engine, request())  # from now on as much of the prompt is cached every time
    ids = [(await answer(engine, request(sampling=sampling))).ids for _ in range(2)]
    other = await answer(engine, request(sampling=replace(sampling, seed=8)))
    assert ids[0] == ids[1] != other.ids


async def test_bias_and_logprobs_are_those_of_the_request(engine: LlamaCppEngine) -> None:
    sampling = replace(GREEDY, logit_bias={500: 100.0})
    reply = await answer(engine, replace(request(sampling=sampling), top_logprobs=3))
    assert reply.ids == [500] * 6
    first = reply.extras[0]
    assert first is not None
    assert first[0].token == 500
    assert len(first[0].top) == 3
    assert first[0].logprob < first[0].top[0][1] <= 0.0


async def test_what_llama_cpp_cannot_do_is_refused_by_name(engine: LlamaCppEngine) -> None:
    with pytest.raises(Unsupported, match="min_tokens"):
        await answer(engine, request(min_tokens=2))
    with pytest.raises(Unsupported, match="regex"):
        await answer(engine, replace(request(), structured=StructuredOutput("regex", "a+")))
    with pytest.raises(Unsupported, match="top_n_sigmas") as refused:
        await answer(engine, replace(request(), extra={"top_n_sigmas": 1}))
    assert "top_n_sigma" in refused.value.hint
    broken = StructuredOutput("grammar", "root ::= (((")
    with pytest.raises(InvalidRequest, match="grammar"):
        await answer(engine, replace(request(), structured=broken))
    with pytest.raises(InvalidRequest, match="vocabulary"):
        await answer(engine, request((5, VOCABULARY)))


async def test_more_requests_than_slots_wait(engine: LlamaCppEngine) -> None:
    from dynamo.core.tasks import run_all

    replies = await run_all(*(answer(engine, request(range(n, n + 40))) for n in range(300, 305)))
    assert [len(reply.ids) for reply in replies] == [6] * 5


async def test_a_file_of_k_quants_is_served(tmp_path: Path) -> None:
    path = tmp_path / "k-quants.gguf"
    path.write_bytes(k_quantised_model())
    files = resolve_model_blocking(str(path), ensure_verified=False)
    settings = Settings(engine=EngineSettings(kind="llamacpp", max_num_seqs=1))
    engine = await open_engine(
        EngineInputs(settings, files.build_card(), files, SystemClock(), 1 << 30)
    )
    info = await engine.start()
    try:
        assert (info.context_tokens, info.vocab_size) == (512, VOCABULARY)
        assert (info.sampling["temperature"], info.sampling["top_p"]) == (0.25, 0.95)
        assert len((await answer(engine, request())).ids) == 6
    finally:
        await engine.stop()
    with files.open_weights() as weights:  # the native engine reads the same file
        assert weights.tensor("model.layers.0.mlp.up_proj.weight").std() > 0


def k_quantised_model() -> bytes:
    """Return a model of one layer in Q4_K and Q6_K, with the default model's vocabulary."""
    with GgufFile(resolve_model_blocking("").path) as file:
        names = ("model", "pre", "tokens", "merges", "eos_token_id")
        values = {f"tokenizer.ggml.{name}": file.get(f"tokenizer.ggml.{name}") for name in names}
    values |= {"general.architecture": "llama", "general.sampling.temp": 0.25} | {
        f"llama.{name}": value
        for name, value in {
            "block_count": 1,
            "context_length": 512,
            "embedding_length": 256,
            "feed_forward_length": 256,
            "attention.head_count": [4],
            "attention.head_count_kv": [2],
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.dimension_count": 64,
        }.items()
    }
    chance, scale = Random(1), struct.pack("<e", 0.01)

    def quantised(rows: int, kind: int) -> tuple[int, tuple[int, int], bytes]:
        """Return random rows of 256 values: one block each."""
        if kind == Q4_K:
            block = scale + scale + chance.randbytes(140)
        else:
            block = chance.randbytes(208) + scale
        return kind, (rows, 256), block * rows

    ones = (0, (256,), struct.pack("<256f", *[1.0] * 256))
    tensors: dict[str, Any] = {
        "token_embd.weight": quantised(VOCABULARY, Q4_K),
        "output_norm.weight": ones,
    }
    for name, rows in (("attn_q", 256), ("attn_k", 128), ("attn_v", 128), ("attn_output", 256)):
        tensors[f"blk.0.{name}.weight"] = quantised(rows, Q4_K)
    for name in ("ffn_gate", "ffn_up", "ffn_down"):
        tensors[f"blk.0.{name}.weight"] = quantised(256, Q6_K)
    tensors |= {"blk.0.attn_norm.weight": ones, "blk.0.ffn_norm.weight": ones}
    return gguf_bytes(values, tensors)


def test_sampling_that_nobody_names_is_the_files_then_llama_cpps() -> None:
    own = default_sampling({}, {})
    assert (own["temperature"], own["top_p"], own["top_k"], own["min_p"]) == (0.8, 0.95, 40, 0.05)
    generation = {"temperature": 0.3, "top_k": 7}
    named = default_sampling(generation, {"sampling.temp": 0.1, "n_batch": 64})
    assert named == own | {"temperature": 0.1, "top_k": 7}


def test_an_unknown_argument_names_the_nearest(tmp_path: Path) -> None:
    sizes = ServerSizes(slots=1, context_tokens=256, arguments={"n_gpu_layer": 1})
    with pytest.raises(ConfigError, match="n_gpu_layer") as refused:
        open_server(tmp_path / "m.gguf", sizes)
    assert "n_gpu_layers" in refused.value.hint


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cont_batching", "false", "is true or false, not 'false'"),
        ("cont_batching", 0, "is true or false, not 0"),
        ("n_batch", 1 << 40, "too large"),
        ("n_batch", "many", "invalid literal"),
        ("__str__", 3, "cannot create"),
        ("n_parallel", 8, "contradict the sizes"),
        ("n_ctx", 8, "contradict the sizes"),
    ],
)
def test_a_wrong_argument_is_refused(
    tmp_path: Path, name: str, value: object, message: str
) -> None:
    sizes = ServerSizes(slots=1, context_tokens=256, arguments={name: value})
    with pytest.raises(ConfigError, match=message):
        open_server(tmp_path / "m.gguf", sizes)


def test_arguments_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    files = resolve_model_blocking("")
    settings = Settings(engine=EngineSettings(args={"api_keys": ["hush"]}))
    inputs = EngineInputs(settings, files.build_card(), files, SystemClock())
    with caplog.at_level("INFO"):
        assert plan_sizes(inputs).arguments == {"api_keys": ["hush"]}
    (record,) = caplog.records
    assert record.__dict__["fields"]["slots"] > 0
    assert "hush" not in str(record.__dict__)


def test_the_reason_of_a_failed_load_is_llama_cpps(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 64)
    with pytest.raises(ModelUnavailable, match="this GGUF file is version"):
        open_server(path, ServerSizes(slots=1, context_tokens=256))


def test_a_deployment_answers_by_llama_cpp(
    tmp_path_factory: pytest.TempPathFactory, runtime_environ: dict[str, str]
) -> None:
    arguments = ["out=llamacpp", "--max-num-seqs", "2", "--max-model-len", "1024"]
    deployment = Deployment(arguments, tmp_path_factory.mktemp("llamacpp"), runtime_environ)
    try:
        deployment.wait_ready(120)
        with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="any") as client:
            completion = client.chat.completions.create(
                model="default",
                messages=[{"role": "user", "content": "What is the capital of France?"}],
                temperature=0,
                max_tokens=30,
            )
            assert completion.choices[0].message.content
            assert completion.usage is not None
            assert completion.usage.completion_tokens == 30
            with pytest.raises(openai.BadRequestError, match="tokens"):
                client.completions.create(model="default", prompt="word " * 2000, max_tokens=5)
    finally:
        deployment.stop()
