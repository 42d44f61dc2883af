"""TensorRT-LLM's LLM as an engine. TensorRT-LLM is imported when it starts."""
