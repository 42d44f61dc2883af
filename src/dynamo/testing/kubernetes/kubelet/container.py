"""A container: a process that is probed, stopped, and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dynamo.communication.http.client import HttpClient
from dynamo.core.host.parent_death_signal import dying_with_parent
from dynamo.core.tasks import BackgroundTasks, wait_at_most, wait_for_first
from dynamo.testing.kubernetes.kinds import Object
from dynamo.testing.kubernetes.kubelet.files import LaunchError, PodFiles

RETRY_S = 0.2
"""Time after which a container that cannot start is tried again."""


class Terms(NamedTuple):
    """Properties of a cluster that all of its containers share."""

    images: tuple[str, ...]
    """Beginnings of the images that there are."""
    env: Mapping[str, str]
    probe_s: float
    """Seconds between two probes at most."""
    backoff_s: float
    """Wait before the second restart; each later one is twice as long."""


class Container:
    """A container of a pod. `publish` writes the pod's status, with `status` in it."""

    def __init__(
        self, terms: Terms, files: PodFiles, spec: Object, address: str,
        publish: Callable[[], None], now: Callable[[], str],
    ) -> None:  # fmt: skip
        self._terms, self._files, self._spec, self._address = terms, files, spec, address
        self._publish, self._now = publish, now
        self._state: Object = {"waiting": {"reason": "ContainerCreating"}}
        self._last_state: Object = {}
        self._started = False
        self._killed_for = ""
        self.name: str = spec["name"]
        self._env: Mapping[str, str] = {}
        self.restarts = 0
        self.ready = False
        self.process: asyncio.subprocess.Process | None = None
        self.exit_code: int | None = None
        """The code of a process that is not started again."""

    @property
    def status(self) -> Object:
        """The entry of the pod's status."""
        image = self._spec["image"]
        return {
            "name": self._spec["name"], "image": image, "imageID": image, "ready": self.ready,
            "started": self._started, "restartCount": self.restarts, "state": self._state,
            "lastState": self._last_state,
        }  # fmt: skip

    def log(self, restarts: int) -> Path:
        """Return the file of the output after so many restarts."""
        return self._files.folder / "logs" / f"{self.name}.{restarts}"

    async def run(self, pod: Callable[[], Object], policy: str, stopping: asyncio.Event) -> None:
        """Run until the container is not to be started again, or the pod stops."""
        backoff_s = 0.0
        while not stopping.is_set():
            code = await self._run_once(pod(), stopping)
            over = policy == "Never" or (policy == "OnFailure" and code == 0)
            if code is not None and (over or stopping.is_set()):
                self.exit_code = code
                return
            if code is not None:
                self._last_state = self._state
                self.restarts += 1
                if backoff_s:
                    self._set_waiting("CrashLoopBackOff", f"back-off {backoff_s:g}s restarting")
            await wait_at_most(stopping.wait(), backoff_s if code is not None else RETRY_S)
            if code is not None:
                backoff_s = min(300.0, max(self._terms.backoff_s, 2 * backoff_s))

    async def _run_once(self, pod: Object, stopping: asyncio.Event) -> int | None:
        """Run a process and return its exit code, None if it could not start."""
        if not self._spec["image"].startswith(self._terms.images):
            text = f'Back-off pulling image "{self._spec["image"]}"'
            self._set_waiting("ImagePullBackOff", text)
            return None
        try:
            command, env, folder = self._files.launch(pod, self._spec, self._terms.env)
        except LaunchError as error:
            self._set_waiting(error.reason, str(error))
            return None
        self._env = env
        with self.log(self.restarts).open("wb") as output:
            self.process = await asyncio.create_subprocess_exec(
                *dying_with_parent(command), env=env, cwd=folder, stdin=asyncio.subprocess.DEVNULL,
                stdout=output, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        process, began = self.process, self._now()
        try:
            self._state = {"running": {"startedAt": began}}
            self._publish()
            async with BackgroundTasks() as tasks:
                tasks.start(self._probe(pod), "probes")
                await wait_for_first(process.wait(), stopping.wait())
                if process.returncode is None:
                    await self.stop(pod["spec"]["terminationGracePeriodSeconds"])
                code = await process.wait()
                code = 128 - code if code < 0 else code
        finally:
            self.ready = self._started = False
            self.kill()
            await process.wait()
            self.process = None
        self._state = {"terminated": self._ended(code, began)}
        self._killed_for = ""
        self._publish()
        return code

    def _ended(self, code: int, began: str) -> Object:
        reason = self._killed_for or ("Error" if code else "Completed")
        times = {"startedAt": began, "finishedAt": self._now()}
        return {"exitCode": code, "reason": reason, **times}

    def _set_waiting(self, reason: str, message: str) -> None:
        self._state = {"waiting": {"reason": reason, "message": message}}
        self._publish()

    def kill(self, reason: str = "") -> None:
        """Kill all processes of the container, for a reason such as OOMKilled."""
        self._killed_for = reason or self._killed_for
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def stop(self, grace_s: float) -> None:
        """End the process: its hook, SIGTERM, and SIGKILL after the grace period."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        hook = (self._spec.get("lifecycle") or {}).get("preStop")
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                if hook and "sleep" in hook:
                    await wait_at_most(process.wait(), hook["sleep"]["seconds"])
                elif hook:
                    await self._ask(hook, grace_s)
                with suppress(ProcessLookupError):
                    process.terminate()
                await process.wait()
        self.kill()

    async def _probe(self, pod: Object) -> None:
        """Follow the probes of the running process."""
        if probe := self._spec.get("startupProbe"):
            async for holds in self._results(probe):
                if holds:
                    break
                await self.stop(pod["spec"]["terminationGracePeriodSeconds"])
                return
        self._started = True
        async with BackgroundTasks() as tasks:
            if probe := self._spec.get("livenessProbe"):
                tasks.start(self._watch_liveness(probe, pod), "liveness")
            if probe := self._spec.get("readinessProbe"):
                async for holds in self._results(probe):
                    if holds != self.ready:
                        self.ready = holds
                        self._publish()
            else:
                self.ready = True
                self._publish()
                await tasks.join()

    async def _watch_liveness(self, probe: Object, pod: Object) -> None:
        async for holds in self._results(probe):
            if not holds:
                await self.stop(pod["spec"]["terminationGracePeriodSeconds"])
                return

    async def _results(self, probe: Object) -> AsyncIterator[bool]:
        """Yield the results that stand. A failure stands once it has lasted as long as the
        threshold's number of periods."""
        await asyncio.sleep(min(probe.get("initialDelaySeconds", 0), self._terms.probe_s))
        loop = asyncio.get_running_loop()
        failing_s = probe["failureThreshold"] * probe["periodSeconds"]
        good_at = loop.time()
        successes = 0
        while True:
            holds = await self._ask(probe, probe["timeoutSeconds"])
            successes = successes + 1 if holds else 0
            if holds:
                good_at = loop.time()
            if successes >= probe["successThreshold"]:
                yield True
            elif not holds and loop.time() - good_at >= failing_s:
                yield False
            await asyncio.sleep(min(probe["periodSeconds"], self._terms.probe_s))

    async def _ask(self, action: Object, timeout_s: float) -> bool:
        """Return whether an action succeeds: an HTTP request, a connection or a command."""
        try:
            async with asyncio.timeout(timeout_s):
                if get := action.get("httpGet"):
                    return await self._get(get)
                if to := action.get("tcpSocket"):
                    _, writer = await asyncio.open_connection(self._address, self._port(to["port"]))
                    writer.close()
                    return True
                return await self._execute(action["exec"]["command"])
        except (OSError, TimeoutError):
            return False

    async def _get(self, get: Object) -> bool:
        scheme = get.get("scheme", "HTTP").lower()
        url = f"{scheme}://{self._address}:{self._port(get['port'])}"
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        client = HttpClient(url, {}, tls)
        try:
            return 200 <= (await client.send("GET", get.get("path", "/"))).status < 400
        finally:
            client.close()

    async def _execute(self, command: list[str]) -> bool:
        null = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *command, env=self._env, stdin=null, stdout=null, stderr=null
        )
        try:
            return await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _port(self, port: int | str) -> int:
        for known in self._spec.get("ports") or ():
            if known.get("name") == port:
                return int(known["containerPort"])
        return int(port)
