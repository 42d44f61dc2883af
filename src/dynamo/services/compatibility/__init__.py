"""Models of programs against NVIDIA Dynamo 1.x: `register_model` and `HttpService`."""
