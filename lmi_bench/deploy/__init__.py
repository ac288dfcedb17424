"""A configuration for a server that others run: written, read and checked. Contacts nobody."""
