"""An engine whose tokens come from a program's handler, in the form of NVIDIA Dynamo's workers."""
