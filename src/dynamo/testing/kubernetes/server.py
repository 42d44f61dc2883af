"""The API server of a cluster, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Self
from urllib.parse import parse_qsl

import msgspec

from dynamo.communication.http import HttpLimits, HttpServer, Request, Response
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import DynamoError
from dynamo.testing.kubernetes import documents, protobuf
from dynamo.testing.kubernetes.access import Access, Attributes
from dynamo.testing.kubernetes.failures import ApiFailure
from dynamo.testing.kubernetes.faults import Faults
from dynamo.testing.kubernetes.kinds import Kind, Object, kind_of_definition
from dynamo.testing.kubernetes.objects import DEFINITIONS, ClusterObjects, Target, Write
from dynamo.testing.kubernetes.store import Change, ClusterStore, Key
from dynamo.testing.kubernetes.watches import JSON, Pages, Watch, selector_of

BOOKMARK_S = 60.0
LOG_POLL_S = 0.2
_LIMITS = HttpLimits(
    max_body_bytes=8 << 20, stream_backlog_bytes=64 << 20, idle_timeout_s=600.0,
    stall_timeout_s=600.0,
)  # fmt: skip
ReadLog = Callable[[Key, Mapping[str, str]], bytes]
"""Takes the key of a pod and the query. Raises `ApiFailure`."""
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class ApiServer:
    """An API server in this process: `async with ApiServer() as server`.

    Requests without a token are the administrator's, as through `kubectl proxy`. Others are those
    of the service account whose token they bear, and are held to its roles.
    """

    def __init__(self, clock: Clock | None = None, *, bookmark_s: float = BOOKMARK_S) -> None:
        self.clock = clock or SystemClock()
        self.store = ClusterStore()
        self.objects = ClusterObjects(self.store, self.clock)
        self.access = Access(self.objects)
        self.faults = Faults()
        self.requests: list[str] = []
        """Method and target of each request, with the user."""
        self.port = 0
        self.read_log: ReadLog | None = None
        """Returns the output of a container, for `kubectl logs`."""
        self._bookmark_s = bookmark_s
        self._pages = Pages()
        self._watches: set[Watch] = set()
        self._http: HttpServer | None = None
        self.store.watchers[""] = {self._on_change}
        for name in ("default", "kube-system"):
            self.objects.create(self.objects.target("namespaces", "", ""), _named(name))

    @property
    def url(self) -> str:
        """The URL at which the server listens."""
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, at the same port as before."""
        self._http = HttpServer(self._handle, _LIMITS, self.clock, on_error=_send_http_error)
        self.port = await self._http.start("127.0.0.1", self.port)

    async def stop(self) -> None:
        """Close all connections and refuse others, as a server that is away."""
        self.cut_watches()
        if self._http is not None:
            await self._http.stop(0.0)
            self._http = None

    def cut_watches(self) -> None:
        """End all watch streams."""
        for watch in self._watches:
            watch.cut.set()

    def compact(self) -> None:
        """Forget the history of all objects."""
        self.store.compact()
        self._pages.clear()

    async def restore(self, backup: Any) -> None:
        """Restart with the objects of an older `store.backup()`."""
        await self.stop()
        self.store.restore(backup)
        self._pages.clear()
        await self.start()

    def _on_change(self, change: Change) -> None:
        """Serve kinds from the moment of their definition until its end."""
        if change.kind != DEFINITIONS:
            return
        kind = kind_of_definition(change.after)
        self.objects.kinds.pop(kind.id, None)
        if not change.deleted:
            self.objects.kinds[kind.id] = kind
            return
        for item in self.store.items(kind.id):
            key = item["metadata"].get("namespace", ""), item["metadata"]["name"]
            self.store.remove(kind.id, key)

    async def _handle(self, request: Request, response: Response) -> None:
        query = dict(parse_qsl(request.query, keep_blank_values=True))
        try:
            user = self.access.user_of(request.header(b"authorization") or "")
            self.requests.append(f"{request.method} {request.path}?{request.query} {user.name}")
            lost = await self.faults.before(request.method, request.path, query, response)
            if response.ended:
                return
            done = ObjectRequest(self, request, query, user.name)
            if request.path.startswith(("/api/", "/apis/")) and done.route():
                self.access.check(user, done.attributes())
                await done.run(_Lost() if lost else response)
            else:
                _send(response, 200, self._document(request.path))
        except ApiFailure as failure:
            _send_failure(response, failure)

    def _document(self, path: str) -> Object:
        kinds = list(self.objects.kinds.values())
        parts = path.strip("/").split("/")
        document: Object | None = None
        if parts[0] in ("readyz", "healthz", "livez"):
            document = {}
        elif parts == ["version"]:
            document = documents.VERSION
        elif parts == ["api"]:
            document = {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
        elif parts == ["apis"]:
            document = documents.group_list(kinds)
        elif parts[0] == "api":
            document = documents.resource_list(kinds, "", parts[1])
        elif parts[0] == "apis" and len(parts) == 2:
            document = documents.one_group(kinds, parts[1])
        elif parts[0] == "apis" and len(parts) == 3:
            document = documents.resource_list(kinds, parts[1], parts[2])
        elif parts == ["openapi", "v3"]:
            document = documents.openapi_index(kinds)
        elif parts[:2] == ["openapi", "v3"]:
            document = documents.openapi(kinds, parts[3] if len(parts) > 4 else "", parts[-1])
        if document is None:
            raise ApiFailure(404, "the server could not find the requested resource")
        return document

    async def watch(self, watch: Watch) -> None:
        """Run a watch until it ends."""
        self._watches.add(watch)
        try:
            await watch.run(self._bookmark_s)
        finally:
            self._watches.discard(watch)

    def page(self, items: list[Object], query: Mapping[str, str]) -> tuple[list[Object], Object]:
        """Return a page of a list and the list's metadata."""
        return self._pages.cut(items, self.store.version, query)


class ObjectRequest:
    """A request for objects."""

    def __init__(
        self, server: ApiServer, request: Request, query: Mapping[str, str], user: str
    ) -> None:
        self._server = server
        self._objects = server.objects
        self._request = request
        self._query = query
        self._user = user
        self._target: Target

    def route(self) -> bool:
        """Find the target of the path. False: the path is no kind's. Raises `ApiFailure`."""
        parts = self._request.path.strip("/").split("/")
        group, rest = ("", parts[1:]) if parts[0] == "api" else (parts[1], parts[2:])
        if len(rest) < 2:
            return False
        version, *rest = rest
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
            namespace, rest = rest[1], rest[2:]
        kind = self._objects.kinds.get(f"{rest[0]}.{group}" if group else rest[0])
        if kind is None or version not in kind.versions or len(rest) > 3:
            raise ApiFailure(404, "the server could not find the requested resource")
        name, subresource = (*rest[1:], "", "")[:2]
        self._target = Target(kind, version, (namespace, name), subresource)
        return True

    def attributes(self) -> Attributes:
        """Return what the request does, for the check of rights."""
        target = self._target
        method, name = self._request.method, target.key[1]
        verb = _VERBS.get(method, "get" if name else "list")
        if method == "GET" and self._query.get("watch") in ("true", "1"):
            verb = "watch"
        if method == "DELETE" and not name:
            verb = "deletecollection"
        name = name or self._query.get("fieldSelector", "").removeprefix("metadata.name=")
        plural = target.kind.plural
        if target.subresource:
            plural += f"/{target.subresource}"
        return Attributes(verb, target.kind.group, plural, target.key[0], name)

    async def run(self, response: Any) -> None:
        """Do the request and answer to `response`."""
        method, target = self._request.method, self._target
        if method in ("GET", "HEAD"):
            await self._read(response)
            return
        write = self._write()
        if target.kind.namespaced and not target.key[0]:
            raise ApiFailure(405, "the server does not allow this method on the requested resource")
        if method == "DELETE":
            self._delete(response, write)
            return
        body = self._body()
        existed = self._server.store.get(target.kind.id, target.key) is not None
        if method == "POST" and target.subresource:
            done = self._server.access.act(target, body, self._user)
        elif method == "POST":
            done = self._objects.create(target, body, write)
        elif method == "PUT":
            done = self._objects.replace(target, body, write)
        else:
            form = (self._request.header(b"content-type") or "").partition(";")[0].strip()
            done = self._objects.patch(target, form, body, write)
        status = 201 if method == "POST" or not existed else 200
        headers = [("warning", f'299 - "{_quoted(text)}"') for text in write.warnings or ()]
        _send(response, status, self._shown([done], {}, single=True), headers)

    async def _read(self, response: Any) -> None:
        target, query, name = self._target, dict(self._query), self._target.key[1]
        if query.get("watch") in ("true", "1"):
            if name:
                query["fieldSelector"] = f"metadata.name={name}"
            show: Callable[[Object], Any] = lambda item: item  # noqa: E731
            if self._wants_table():
                show = lambda item: self._shown([item], {}, single=True)  # noqa: E731
            await self._server.watch(Watch(self._objects, target, query, response, show))
            return
        if name:
            item = self._objects.read(target)
            if target.subresource == "log":
                await self._send_log(response)
                return
            if target.subresource == "scale":
                item = self._objects.scale_of(target, item)
            elif target.subresource not in ("", "status"):
                item = self._server.access.act(target, {}, self._user)
            _send(response, 200, self._shown([item], {}, single=True))
            return
        selects = selector_of(query)
        items = [
            self._objects.in_version(target, item)
            for item in self._server.store.items(target.kind.id, target.key[0])
            if selects(item)
        ]
        items = self._server.faults.stale(target.kind.id, items)
        items, metadata = self._server.page(items, query)
        _send(response, 200, self._shown(items, metadata))

    async def _send_log(self, response: Any) -> None:
        read, query = self._server.read_log, self._query
        if read is None:
            raise ApiFailure(400, "the pods of this cluster have no processes")
        sent, response_type = 0, (("content-type", "text/plain"),)
        while response.open:
            output = read(self._target.key, query)
            if sent == 0:
                lines = output.splitlines(keepends=True)
                skipped = lines[: len(lines) - int(query.get("tailLines", len(lines)))]
                sent = sum(map(len, skipped))
                response.start(200, response_type)
            if output[sent:]:  # an empty chunk would end the answer
                response.write(output[sent:])
            sent = len(output)
            if query.get("follow") != "true":
                response.end()
                return
            await asyncio.sleep(LOG_POLL_S)

    def _delete(self, response: Any, write: Write) -> None:
        target = self._target
        options = self._body() if self._request.body else {}
        for name in ("gracePeriodSeconds", "propagationPolicy"):
            if name in self._query:
                text = self._query[name]
                options[name] = int(text) if text.isdigit() else text
        if target.key[1]:
            item = self._objects.delete(target, options, write)
            gone = self._server.store.get(target.kind.id, target.key) is None
            status = {
                "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success",
                "details": {"name": target.key[1], "group": target.kind.group,
                            "kind": target.kind.plural, "uid": item["metadata"]["uid"]},
            }  # fmt: skip
            _send(response, 200, status if gone and not write.dry_run else item)
            return
        selects = selector_of(self._query)
        items = self._server.store.items(target.kind.id, target.key[0])
        items = [item for item in items if selects(item)]
        for item in items:
            metadata = item["metadata"]
            single = target._replace(key=(metadata.get("namespace", ""), metadata["name"]))
            self._objects.delete(single, options, write)
        _send(
            response, 200, self._shown(items, {"resourceVersion": str(self._server.store.version)})
        )

    def _write(self) -> Write:
        agent = (self._request.header(b"user-agent") or "unknown").partition("/")[0]
        query = self._query
        return Write(
            manager=query.get("fieldManager") or agent,
            dry_run="dryRun" in query,
            force=query.get("force") in ("true", "1"),
            validation=query.get("fieldValidation") or "Warn",
            warnings=[],
        )

    def _body(self) -> Any:
        data = bytes(self._request.body)
        form = self._request.header(b"content-type") or ""
        if data.startswith(protobuf.MAGIC):
            return protobuf.decode(data)
        try:
            if "yaml" in form and data[:1] not in (b"{", b"["):
                return msgspec.yaml.decode(data)
            return msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise ApiFailure(400, f"error decoding the body: {error}") from None

    def _wants_table(self) -> bool:
        accept = self._request.header(b"accept") or ""
        return "as=Table" in accept.split(",")[0]

    def _shown(self, items: list[Object], metadata: Object, *, single: bool = False) -> Object:
        """Return an object or a list, as a table if the client wants a table."""
        target = self._target
        kind: Kind = target.kind
        if self._wants_table() and self._request.method == "GET" and not target.subresource:
            now = self._objects.now()
            return documents.table(kind, target.version, items, metadata, now)
        if single:
            return items[0]
        api_version = kind.api_version(target.version)
        listed = {"kind": f"{kind.name}List", "apiVersion": api_version}
        if not kind.schemas:  # objects of built-in kinds tell their kind only when read alone
            named = ("kind", "apiVersion")
            items = [{k: v for k, v in item.items() if k not in named} for item in items]
        return {**listed, "metadata": metadata, "items": items}


class _Lost:
    """The answer of a request that is done and never told."""

    open = started = ended = True

    def send(self, *_: object) -> None:
        """Send nothing."""


def _named(name: str) -> Object:
    return {"metadata": {"name": name}}


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _send(response: Any, status: int, body: Any, headers: Any = ()) -> None:
    response.send(status, (*JSON, *headers), msgspec.json.encode(body))


def _send_failure(response: Response, failure: ApiFailure) -> None:
    wait = failure.retry_after_s
    headers = (("retry-after", str(wait)),) if wait else ()
    if not response.started:
        _send(response, failure.code, failure.status, headers)


def _send_http_error(error: DynamoError, request: Request, response: Response) -> None:
    del request
    failure = ApiFailure(400 if error.code != "internal" else 500, error.message)
    _send_failure(response, failure)
