"""Writes, reads and checks configurations for other servers, without network access."""
