"""vLLM's AsyncLLM as an engine. Only `startup` imports vLLM."""
