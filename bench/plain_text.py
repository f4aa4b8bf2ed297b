"""Foreign text as plain text: what a log or a file says must not drive the reader's terminal."""

from __future__ import annotations

import re

_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # a terminal's colour or cursor sequence
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # its title or hyperlink sequence
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def clean_text(text: str) -> str:
    """Take out of a foreign text what a terminal would obey and what UTF-8 cannot hold."""
    return _CONTROL.sub("", text).encode("utf-8", "replace").decode("utf-8")
