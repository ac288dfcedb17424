"""Embeddings (`/v1/embeddings`, also of SGLang and TEI).

The answer is one vector, with an end and neither tokens nor times within it.
"""

from typing import Any

import orjson

from lmi_bench.core.workload import PlannedRequest
from lmi_bench.wire.event import WireEvent
from lmi_bench.wire.json_format import SseFormat, error_event


class EmbeddingsFormat(SseFormat):
    """`/v1/embeddings` with one text; `stream` has no meaning."""

    name = "embeddings"
    path = "/v1/embeddings"
    payload_name = "a list of embeddings"

    def request_body(self, request: PlannedRequest, *, model: str, stream: bool = True) -> bytes:
        return orjson.dumps({"model": model, "input": self.prompt_text(request)})

    def event(self, reply: dict[str, Any]) -> WireEvent:
        if reply.get("error"):
            return error_event(reply)
        vectors = [each["embedding"] for each in reply["data"]]
        if not vectors or not all(vectors):
            raise ValueError("it has no vector")
        count = (reply.get("usage") or {}).get("prompt_tokens")
        model = reply.get("model")
        return WireEvent(model=model, input_tokens=count, output_tokens=0, tokenless=True, end=True)
