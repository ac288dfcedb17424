"""Request and stream formats of the serving protocols, for the client and the server."""
