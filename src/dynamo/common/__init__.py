"""The parts of NVIDIA Dynamo's package `dynamo.common` that programs use."""
