"""llama.cpp's server in the worker's process, by the wheel `xllamacpp`."""
