"""Readers of checkpoints: GGUF and safetensors files as float32 arrays."""
