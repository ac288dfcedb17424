"""Bytes that were damaged on their way."""

from __future__ import annotations


def torn(data, draw):
    """The bytes with some changed, cut out or cut off."""
    found = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(found)) if found else 0
        kind = draw.random()
        if kind < 0.4 and found:
            found[at] = draw.randrange(256)
        elif kind < 0.7:
            del found[at : at + draw.randint(1, 40)]
        else:
            del found[at:]
    return bytes(found)
