"""The files that a plan becomes: settings for `dynamo serve`, a compose file, Dynamo's graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.operations.configure.catalogue import engines
from dynamo.operations.configure.plans import Layout, Plan, Question

STEP_TOKENS = 8192
HEADROOM = 1.25
"""Sequences that an engine may run, over those of the plan."""
FRONTEND_PORT = 8000
FP8_KV = '{"kv_cache_config": {"dtype": "fp8"}}'
"""The value of TensorRT-LLM's flag for an fp8 KV cache."""


def serve_settings(plan: Plan, question: Question, model: str) -> Mapping[str, Any]:
    """Return the settings for `dynamo serve` and `dynamo run`."""
    layout = plan.layout
    engine: dict[str, Any] = {
        "kind": engines()[layout.engine].kind,
        "max_num_seqs": most_seqs(plan),
        "max_num_batched_tokens": max(STEP_TOKENS, most_seqs(plan)),
        "kv_cache_dtype": "fp8" if layout.kv_precision == "fp8" else "auto",
    }
    if layout.stages > 1:
        engine["pipeline_parallel_size"] = layout.stages
    engine |= _parallel_settings(layout)
    settings: dict[str, Any] = {
        "version": 1,
        "model": {"path": model, "context_tokens": context_tokens(question)},
        "engine": engine,
        "router": {"mode": "kv" if question.prefix else "round_robin"},
    }
    if plan.prefill_layout is None:
        engine["workers"] = plan.replicas
        return settings
    engine["tensor_parallel_size"] = 1
    engine["workers"] = 0
    settings["workers"] = {
        "prefill": {
            "replicas": plan.prefill_workers,
            "tensor_parallel_size": _tensor(plan.prefill_layout),
        },
        "decode": {
            "replicas": plan.replicas,
            "tensor_parallel_size": _tensor(layout),
            "max_batch_size": most_seqs(plan),
        },
    }
    return settings


def most_seqs(plan: Plan) -> int:
    """Return the sequences that a worker may run at once."""
    return max(1, min(int(plan.concurrency * HEADROOM + 1), int(plan.capacity * HEADROOM) + 1))


def context_tokens(question: Question) -> int:
    """Return the tokens of the longest request that is foreseen: twice the mean one."""
    wanted = 2 * (question.isl + question.osl)
    return min(wanted, question.shape.context_tokens or wanted)


def _tensor(layout: Layout) -> int:
    return 1 if layout.attention_dp and layout.engine == "vllm" else layout.tensor


def _parallel_settings(layout: Layout) -> Mapping[str, Any]:
    """Return sizes of parallelism, and what an engine calls them that has names of its own."""
    sizes: dict[str, Any] = {"tensor_parallel_size": _tensor(layout)}
    if layout.engine == "vllm":
        if layout.attention_dp:
            sizes["data_parallel_size"] = layout.tensor
        if layout.split_experts:
            sizes["args"] = {"enable_expert_parallel": True}
        return sizes
    if layout.engine == "sglang":
        args: dict[str, Any] = {"ep_size": layout.tensor} if layout.split_experts else {}
        if layout.attention_dp:
            args |= {"enable_dp_attention": True, "dp_size": layout.tensor}
    else:
        args = {"moe_expert_parallel_size": layout.tensor} if layout.split_experts else {}
        if layout.attention_dp:
            args["enable_attention_dp"] = True
    if args:
        sizes["args"] = args
    return sizes


def worker_command(layout: Layout, plan: Plan, question: Question, model: str) -> Sequence[str]:
    """Return the command of a worker in Dynamo's images."""
    engine = engines()[layout.engine]
    flag = engine.flags
    short = FP8_KV if layout.engine == "trtllm" else "fp8"
    own = [
        ("model", model),
        ("tp", str(_tensor(layout))),
        ("pp", str(layout.stages) if layout.stages > 1 else ""),
        ("seqs", str(most_seqs(plan))),
        ("tokens", str(max(STEP_TOKENS, most_seqs(plan)))),
        ("context", str(context_tokens(question))),
        ("kv", short if layout.kv_precision == "fp8" else ""),
        ("dp", str(layout.tensor) if layout.attention_dp and "dp" in flag else ""),
    ]
    words = [part for name, value in own if value and name in flag for part in (flag[name], value)]
    if layout.split_experts:
        words += [flag["ep"], *([] if layout.engine == "vllm" else [str(layout.tensor)])]
    if layout.attention_dp and layout.engine != "vllm":
        sglang = layout.engine == "sglang"
        words.append("--enable-dp-attention" if sglang else "--enable-attention-dp")
    return ["python3", "-m", engine.module, *words]


def workers_of(plan: Plan) -> Sequence[tuple[str, str, int, Layout]]:
    """Return name, role, number and layout of each kind of worker."""
    if plan.prefill_layout is None:
        return [("worker", "", plan.replicas, plan.layout)]
    return [
        ("prefill", "prefill", plan.prefill_workers, plan.prefill_layout),
        ("decode", "decode", plan.replicas, plan.layout),
    ]


def compose_file(plan: Plan, question: Question, model: str) -> Mapping[str, Any]:
    """Return a compose file: a frontend, and the workers with their GPUs, for one host."""
    image = engines()[plan.layout.engine].image
    planes = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": "/shared/discovery"}
    common = {
        "image": image,
        "environment": planes,
        "network_mode": "host",
        "volumes": [
            "discovery:/shared",
            "${MODELS:-~/.cache/huggingface}:/root/.cache/huggingface",
        ],
    }
    services: dict[str, Any] = {
        "frontend": {
            **common,
            "command": ["python3", "-m", "dynamo.frontend", "--http-port", str(FRONTEND_PORT)],
        }
    }
    device = 0
    for name, role, count, layout in workers_of(plan):
        for number in range(count):
            ids = [str(device + place) for place in range(layout.gpus)]
            device += layout.gpus
            command = [*worker_command(layout, plan, question, model), *_role_flags(role)]
            gpus = [{"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}]
            services[f"{name}-{number}"] = {
                **common,
                "command": command,
                "ipc": "host",
                "deploy": {"resources": {"reservations": {"devices": gpus}}},
            }
    return {"services": services, "volumes": {"discovery": {}}}


def _role_flags(role: str) -> Sequence[str]:
    return ["--disaggregation-mode", role] if role else []


def graph_file(plan: Plan, question: Question, model: str, name: str) -> Mapping[str, Any]:
    """Return a DynamoGraphDeployment, v1beta1."""
    engine = engines()[plan.layout.engine]
    frontend = {
        "name": "Frontend",
        "type": "frontend",
        "replicas": 1,
        "podTemplate": _pod(
            {
                "name": "main",
                "image": engine.image,
                "command": ["python3", "-m", "dynamo.frontend"],
                "env": [
                    {"name": "DYN_ROUTER_MODE", "value": "kv" if question.prefix else "round-robin"}
                ],
            }
        ),
    }
    components: list[dict[str, Any]] = [frontend]
    for part, role, count, layout in workers_of(plan):
        words = [*worker_command(layout, plan, question, model), *_role_flags(role)]
        nodes = -(-layout.gpus // min(8, question.gpu.gpus))
        component: dict[str, Any] = {
            "name": part,
            "type": role or "worker",
            "replicas": count,
            "podTemplate": _pod(
                {
                    "name": "main",
                    "image": engine.image,
                    "command": list(words[:3]),
                    "args": list(words[3:]),
                    "envFrom": [{"secretRef": {"name": "hf-token-secret", "optional": True}}],
                    "resources": {"limits": {"nvidia.com/gpu": str(layout.gpus // nodes)}},
                }
            ),
        }
        if nodes > 1:
            component["multinode"] = {"nodeCount": nodes}
        components.append(component)
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": name},
        "spec": {"backendFramework": plan.layout.engine, "components": components},
    }


def _pod(container: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"spec": {"containers": [dict(container)]}}
