"""A retrieval service between HTTP and the model.

    dynamo serve retrieval:Frontend -f retrieval.yaml

Requests for the model `with-documents` pass Retrieval, which puts what it finds before the
conversation and hands the request on: the answer's tokens do not pass it. Requests for the model
itself never leave the usual way.
"""

from pathlib import Path
from typing import Any

import msgspec

from dynamo.sdk import depends, dynamo_endpoint, on_start, service
from dynamo.services import Frontend, Processor, Worker


class DocumentsConfig(msgspec.Struct):
    """Section `Documents` of the file."""

    folder: str = "documents"
    at_most: int = 2


@service(dynamo={"namespace": "dynamo"}, workers=2)
class Documents:
    """Finds the texts that share the most words with a question."""

    config: DocumentsConfig

    @on_start
    def read(self) -> None:
        folder = Path(__file__).parent / self.config.folder
        texts = [path.read_text() for path in sorted(folder.glob("*.txt"))]
        self.texts = [(set(text.lower().split()), text) for text in texts]

    @dynamo_endpoint()
    async def find(self, request: dict[str, str]) -> list[str]:
        words = set(request["question"].lower().replace("?", "").split())
        ranked = sorted(self.texts, key=lambda one: len(words & one[0]), reverse=True)
        return [text for known, text in ranked[: self.config.at_most] if words & known]


@service(dynamo={"namespace": "dynamo", "model": "with-documents"})
class Retrieval:
    """What HTTP clients reach as the model `with-documents`."""

    documents = depends(Documents)
    processor = depends(Processor)

    @dynamo_endpoint()
    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        question = request["messages"][-1]["content"]
        found = await self.documents.find({"question": question})
        if not found:
            return request
        about = "Answer with the help of these texts:\n\n" + "\n\n".join(found)
        return {**request, "messages": [{"role": "system", "content": about}, *request["messages"]]}


Frontend.link(Retrieval)
Frontend.link(Processor).link(Worker)
