"""Takes secrets out of text before it is shown: evidence lines come from other people's logs.

A value goes when its key says that it is secret, when it has the form of a known credential, or
when it stands as user information in an address. Numbers of tokens stay.
"""

from __future__ import annotations

import re

HIDDEN = "<redacted>"

_KEY = r"""[A-Za-z0-9_.-]*(?:api[_-]?key|access[_-]?key(?:[_-]id)?|secret[_-]?key|secret
    |passw(?:or)?d|passphrase|private[_-]?key|credentials?|authorization|auth[_-]?token
    |(?<![A-Za-z])token|_token|-token|signature|sig)"""
_KEYED = re.compile(
    rf"""(?P<key>(?<![A-Za-z0-9_]){_KEY})(?P<middle>["']?\s*(?:=>|[:=])\s*)"""
    r"""(?P<value>"[^"]*"|'[^']*'|(?:Bearer\s+|Basic\s+)?[^\s"',;&)}\]]+)""",
    re.IGNORECASE | re.VERBOSE,
)
_PLAIN_TOKEN = re.compile(r"(?:eos|bos|pad|unk|sep|cls|mask|image|stop|next)_token$", re.IGNORECASE)
_NUMBER = re.compile(r"^[\"']?(?:-?\d+(?:\.\d+)?|None|null|True|False)[\"']?$", re.IGNORECASE)
_ADDRESS = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)[^\s/@:]*(?::[^\s/@]*)?@", re.IGNORECASE)
_FORMS = re.compile(
    r"""\b(?:hf_[A-Za-z0-9]{16,}|gh[opsu]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}
    |glpat-[A-Za-z0-9_-]{16,}|sk-[A-Za-z0-9_-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}
    |xox[abprs]-[A-Za-z0-9-]{10,}|AIza[A-Za-z0-9_-]{30,}
    |eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,})""",
    re.VERBOSE,
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_FLAG = re.compile(
    r"(?P<flag>--?[A-Za-z0-9-]*(?:password|api[_-]key|secret|[a-z]*token))\s+(?P<value>[^\s-]\S+)",
    re.IGNORECASE,
)


def _hide_keyed(match: re.Match[str]) -> str:
    if _PLAIN_TOKEN.search(match["key"]) or _NUMBER.match(match["value"]):
        return match[0]
    return f"{match['key']}{match['middle']}{HIDDEN}"


def _hide_flag(match: re.Match[str]) -> str:
    return match[0] if _NUMBER.match(match["value"]) else f"{match['flag']} {HIDDEN}"


def redact(text: str) -> str:
    """Return the text with every secret replaced by `<redacted>`."""
    text = _ADDRESS.sub(lambda match: f"{match['scheme']}{HIDDEN}@", text)
    text = _FORMS.sub(HIDDEN, text)
    text = _BEARER.sub(lambda match: f"{match[1]} {HIDDEN}", text)
    text = _FLAG.sub(_hide_flag, text)
    return _KEYED.sub(_hide_keyed, text)
