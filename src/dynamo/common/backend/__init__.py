"""NVIDIA Dynamo's harness for engines that users write: `run(MyEngine)` serves a class."""

from dynamo.common.backend.engine import (
    BaseEngine,
    DiffusionEngine,
    EngineConfig,
    GenerateChunk,
    GenerateRequest,
    LLMEngine,
    LlmRegistration,
    RawEngine,
)
from dynamo.common.backend.worker import Worker, WorkerConfig

__all__ = [
    "BaseEngine",
    "DiffusionEngine",
    "EngineConfig",
    "GenerateChunk",
    "GenerateRequest",
    "LLMEngine",
    "LlmRegistration",
    "RawEngine",
    "Worker",
    "WorkerConfig",
]
