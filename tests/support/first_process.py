"""A program that runs each kind of first process on an empty machine, in a fork of its own.

Prints a JSON object: by machine and kind, the modes of the folders that the process made, what it
wrote, and whether the next process finds a state folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import io
import json
import logging
import os
import pwd
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from dynamo.cli import main
from dynamo.communication.discovery import open_discovery
from dynamo.core.settings import Settings
from dynamo.library.kv_router import KvRouter
from dynamo.runtime import deployment
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.planes import planes_of
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.supervisor import Supervisor

SETTINGS = Settings()
CHILD = 'import json, os, signal; os.write(0, b\'{"state": "ready"}\\n\'); signal.pause()'


def run_supervisor(trace: Path) -> int:
    """Run a supervisor with one child until it is ready."""

    async def run() -> int:
        command = (sys.executable, "-S", "-c", CHILD)
        spec = ChildSpec(role="worker", name="child", settings=SETTINGS, command=command)
        supervisor = Supervisor([spec], deployment.deployment_of(SETTINGS), SETTINGS)
        running = asyncio.ensure_future(supervisor.run())
        await supervisor.ready.wait()
        supervisor.stop()
        return await running

    return asyncio.run(run())


def run_runtime(trace: Path) -> int:
    """Serve an endpoint by a runtime."""

    async def run() -> int:
        async with await DistributedRuntime.create() as runtime:
            await runtime.endpoint("dynamo.Own.answer").serve(lambda request, context: None)
        return 0

    return asyncio.run(run())


def run_discovery(trace: Path) -> int:
    """Open the default discovery plane alone, as after a removal of the folders by the system."""

    async def run() -> int:
        plane = await open_discovery(planes_of(SETTINGS).discovery)
        await plane.put("/key", b"")
        await plane.close()
        return 0

    return asyncio.run(run())


def run_client(trace: Path) -> int:
    """Look for the instances of an endpoint."""

    async def run() -> int:
        async with await DistributedRuntime.create() as runtime:
            client = await runtime.endpoint("dynamo.Own.answer").client()
            return len(client.instances)

    return asyncio.run(run())


def run_kv_router(trace: Path) -> int:
    """Open a KvRouter."""

    async def run() -> int:
        async with (
            await DistributedRuntime.create() as runtime,
            KvRouter(runtime.namespace("dynamo").component("worker"), 16),
        ):
            return 0

    return asyncio.run(run())


KINDS: dict[str, Callable[[Path], int]] = {
    "supervisor": run_supervisor,
    "runtime": run_runtime,
    "discovery": run_discovery,
    "client": run_client,
    "KvRouter": run_kv_router,
    "call": lambda trace: main(["call", "dynamo.Own.answer"]) - 1,  # nothing runs
    "doctor": lambda trace: main(["doctor", "--http-port", "0"]) & 0,  # a home may be missing
    "ps": lambda trace: main(["ps"]),
    "replay": lambda trace: main(["replay", str(trace), "--workers", "2"]),
}


def without_home(machine: Path) -> None:
    """Take the home away, as for a user of a container whom /etc/passwd does not know."""

    def fail(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    del os.environ["HOME"]
    pwd.getpwuid = fail


def with_readonly_home(machine: Path) -> None:
    """Let nobody write to the home. The superuser gives up the capabilities that would."""
    (machine / "home").chmod(0o500)
    ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())


def with_runtime_folder(machine: Path) -> None:
    """Give the user a runtime folder, as systemd does."""
    (machine / "run").mkdir(mode=0o700)
    os.environ["XDG_RUNTIME_DIR"] = str(machine / "run")


def with_tmpdir(machine: Path) -> None:
    """Set $TMPDIR."""
    (machine / "scratch").mkdir()
    os.environ["TMPDIR"] = str(machine / "scratch")


def with_open_root(machine: Path) -> None:
    """Leave a state folder open to other users, as an earlier version made it."""
    (machine / "tmp" / f"dynamo-{os.getuid()}").mkdir(mode=0o755)


MACHINES: dict[str, Callable[[Path], object]] = {
    "umask 000": lambda machine: os.umask(0o000),
    "umask 022": lambda machine: os.umask(0o022),
    "umask 077": lambda machine: os.umask(0o077),
    "no home": without_home,
    "read-only home": with_readonly_home,
    "runtime folder": with_runtime_folder,
    "TMPDIR": with_tmpdir,
    "open root": with_open_root,
}


def empty_machine(machine: Path) -> None:
    """Make the folders of an empty machine, and point this process to them."""
    os.umask(0o022)
    for name, mode in (("home", 0o755), ("tmp", 0o1777)):
        (machine / name).mkdir()
        (machine / name).chmod(mode)
    for name in [name for name in os.environ if name.startswith(("XDG_", "DYNAMO_", "TMPDIR"))]:
        del os.environ[name]
    os.environ["HOME"] = str(machine / "home")
    deployment._TEMPORARY_FOLDER = machine / "tmp"


def run_first(kind: str, machine: Path, prepare: Callable[[Path], object], trace: Path) -> Any:
    """Run one process and return what it left."""
    empty_machine(machine)
    prepare(machine)
    before = {path for path, _ in folders(machine)}
    modes: dict[str, str] = {}
    _before_removal(lambda: modes.update(new_modes(machine, before)))
    printed = io.StringIO()
    logging.basicConfig(stream=printed, force=True, level=logging.WARNING, format="%(message)s")
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            status = KINDS[kind](trace)
        except BaseException:
            status = -1
            printed.write(traceback.format_exc())
    modes |= new_modes(machine, before)
    root = deployment.deployment_of(SETTINGS).folder.parent
    return {"status": status, "modes": modes, "printed": printed.getvalue(), "root": str(root)}


def folders(machine: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folders below `machine` with their modes."""
    for path in machine.rglob("*"):
        if path.is_dir():
            yield path, path.stat().st_mode & 0o777


def new_modes(machine: Path, before: set[Path]) -> dict[str, str]:
    """Return the modes of folders that were not there before."""
    return {str(path): oct(mode) for path, mode in folders(machine) if path not in before}


def _before_removal(look: Callable[[], None]) -> None:
    """Call `look` before a deployment's folder is removed."""
    remove = deployment.Deployment.remove_if_unused

    def remove_if_unused(self: deployment.Deployment) -> None:
        look()
        remove(self)

    deployment.Deployment.remove_if_unused = remove_if_unused


def in_a_fork(work: Callable[[], Any]) -> Any:
    """Return the result of `work` in a fork."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        with os.fdopen(writing, "w") as pipe:
            json.dump(work(), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text)


if __name__ == "__main__":
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, prepare in MACHINES.items():
            for kind in KINDS:
                machine = Path(folder) / f"{name} {kind}"
                machine.mkdir()
                work = partial(run_first, kind, machine, prepare, Path(sys.argv[1]))
                results.setdefault(name, {})[kind] = in_a_fork(work)
    json.dump(results, sys.stdout)
