"""Sends one request as a level does."""

from lmi_bench.loadgen.run.sender import Sender


async def measure(send, request, due_s, **options):
    return await Sender(send, **options).measure(request, due_s)
