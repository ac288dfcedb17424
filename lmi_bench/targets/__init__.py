"""Opens what is measured or served: an engine in this process or an endpoint."""
