"""Renders results as HTML and Markdown."""
