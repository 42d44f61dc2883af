"""A retrieval service between HTTP and the model.

    dynamo serve retrieval:Frontend -f retrieval.yaml

Requests for the model `with-documents` go to Retrieval, which adds matching texts as a system
message and returns the request. The model answers the returned request directly, so tokens do not
pass through Retrieval. Requests for the model itself skip Retrieval.
"""

from pathlib import Path
from typing import Any

import msgspec

from dynamo.sdk import depends, dynamo_endpoint, on_start, service
from dynamo.services import Frontend, Processor, Worker


class DocumentsConfig(msgspec.Struct):
    """Section `Documents` of the configuration file."""

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
        ranked = sorted(self.texts, key=lambda document: len(words & document[0]), reverse=True)
        return [text for text_words, text in ranked[: self.config.at_most] if words & text_words]


@service(dynamo={"namespace": "dynamo", "model": "with-documents"})
class Retrieval:
    """Serves the model `with-documents` for HTTP clients."""

    documents = depends(Documents)
    processor = depends(Processor)

    @dynamo_endpoint()
    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        question = request["messages"][-1]["content"]
        texts = await self.documents.find({"question": question})
        if not texts:
            return request
        prompt = "Answer with the help of these texts:\n\n" + "\n\n".join(texts)
        return {
            **request,
            "messages": [{"role": "system", "content": prompt}, *request["messages"]],
        }


Frontend.link(Retrieval)
Frontend.link(Processor).link(Worker)
