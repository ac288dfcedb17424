"""A listener that keeps what it hears."""

from __future__ import annotations


class Hearing:
    def __init__(self):
        self.notes, self.steps, self.warnings = [], [], []

    def note(self, text):
        self.notes.append(text)

    def step(self, text):
        self.steps.append(text)

    def warn(self, text):
        self.warnings.append(text)

    def progress(self, description, done, total):
        pass
