"""The Python API of NVIDIA Dynamo 1.x over this runtime, for programs that move here.

    @dynamo_worker()
    async def worker(runtime):
        await runtime.endpoint("hello.backend.generate").serve_endpoint(handler)

Public names, arguments and results are those of NVIDIA Dynamo's Python bindings. `dynamo._core`
and `dynamo.llm` export them by those names. `docs/how-to/migrate.md` lists what differs and what
does not exist.
"""
