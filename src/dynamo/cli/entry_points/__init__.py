"""The processes of NVIDIA Dynamo 1.x, such as `python -m dynamo.frontend`, on this project's own.

The flags and variables of each are in text files beside this module.
"""
