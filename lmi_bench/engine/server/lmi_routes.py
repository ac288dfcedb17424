"""The LMI routes: `/ping`, `/invocations` and `/predictions/{model}`.

Replies follow djl-serving 0.27 to 0.34 (rolling batch) or its later async mode (`lmi_reply`).
"""

from __future__ import annotations

from aiohttp import web

from lmi_bench.engine.server.answer import Prompt
from lmi_bench.engine.server.failures import UnknownModelError, json_response
from lmi_bench.engine.server.fields import load_json_object
from lmi_bench.engine.server.formatters import NO_FORMATTERS, Formatters
from lmi_bench.engine.server.lmi_reply import RollingBatchReply
from lmi_bench.engine.server.lmi_request import read_lmi_call
from lmi_bench.engine.server.state import ServerState
from lmi_bench.engine.server.streaming import PLAIN, Envelope, send_stream, stream_writes


class LmiRoutes:
    """Handlers over one served model."""

    def __init__(
        self,
        state: ServerState,
        reply_type: type[RollingBatchReply] = RollingBatchReply,
        formatters: Formatters = NO_FORMATTERS,
    ) -> None:
        self._state = state
        self._reply_type = reply_type
        self._formatters = formatters

    def add_to(self, app: web.Application) -> None:
        """Register the routes."""
        app.router.add_route("GET", "/ping", self.ping)
        app.router.add_route("POST", "/ping", self.ping)
        app.router.add_post("/invocations", self.invocations)
        app.router.add_post("/predictions/{model}", self.predictions)

    async def ping(self, request: web.Request) -> web.Response:
        """200 while the engine works, else 500."""
        if self._state.engine.error is not None:
            return json_response({"status": "Unhealthy"}, status=500)
        return json_response({"status": "Healthy"})

    async def predictions(self, request: web.Request) -> web.StreamResponse:
        """`/invocations` under the model's name."""
        model = request.match_info["model"]
        if model != self._state.model_name:
            raise UnknownModelError(
                f"model {model!r} is not served here: use {self._state.model_name!r}"
            )
        return await self.invocations(request)

    async def invocations(
        self, request: web.Request, envelope: Envelope = PLAIN
    ) -> web.StreamResponse:
        """Generate text, at once or as a stream of JSON lines."""
        state = self._state
        body = load_json_object(await request.read())
        body = self._formatters.request(body, state.codec)
        call = read_lmi_call(body, state.codec.eos_token_ids)
        token_ids = await state.encode(call.inputs)
        if call.truncate is not None:
            token_ids = token_ids[-call.truncate :]
        answer = state.submit(
            Prompt(token_ids, call.sampling, call.stop_strings, call.keep_stop_string)
        )
        try:
            headers = state.ignored_header(call.ignored)
            reply = self._reply_type(call, answer, state, self._formatters)
            if call.stream:
                return await send_stream(
                    request,
                    stream_writes(answer, reply.lines, reply.end, reply.failure_line),
                    headers={"Content-Type": "application/jsonlines", **headers},
                    envelope=envelope,
                )
            await answer.complete()
            return json_response(reply.whole(), headers=headers)
        finally:
            answer.close()
            state.count(answer)
