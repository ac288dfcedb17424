"""The HTTP server over the engine: LMI and OpenAI routes. The only place that imports aiohttp."""
