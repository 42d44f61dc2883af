"""Foreign engines: what vLLM, SGLang, TensorRT-LLM, llama.cpp and servers by URL have in common.

Each has a folder beside this one for its parameters and its answers. Here are the versions and
arguments of their packages, their start and their processes, their answers, and the views of their
prefix caches.
"""
