"""The serving engine: scheduler, executors, step back ends and HTTP server."""
