# SPDX-License-Identifier: Apache-2.0
"""Texts that peers choose end up in logs and on terminals, which obey escape sequences."""


def printable(text: str, *, instead: str = "?", kept: str = "") -> str:
    """The text without control characters, but for those `kept`."""
    return "".join(c if c.isprintable() or c in kept else instead for c in text)
