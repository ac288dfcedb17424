"""The HTTP server over the engine: LMI, OpenAI, TGI and SageMaker routes."""
