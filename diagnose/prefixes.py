"""What launchers and loggers put before a line: taken off, and read for rank and time.

Knows torchrun (`[rank3]:`, `[default3]:`), torch's C++ logger (`[E1230 12:34:56.1 file.cpp:1]`),
Ray (`(Worker pid=7)`), srun (`3: `), mpirun (`[1,3]<stderr>:`), Python logging, NCCL and vLLM
headers. Times become seconds of a year without a name, since torch's headers do not say the year.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_RICH_BORDER = re.compile(r"^[\u2502\u2503|]\s?(.*?)\s*[\u2502\u2503|]?$")

_DATE = r"(?P<year>\d{4})[-/](?P<month>\d\d)[-/](?P<day>\d\d)"
_CLOCK = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d(?:[.,]\d+)?)"
_STAMPS = (
    re.compile(rf"{_DATE}[T _]{_CLOCK}"),
    re.compile(rf"\b\d{{4}}(?P<month>\d\d)(?P<day>\d\d)[-T ]{_CLOCK}"),
    re.compile(rf"\b[IWEFCV](?P<month>1[0-2]|0?[1-9])(?P<day>\d\d) {_CLOCK}"),
    re.compile(rf"\b(?P<month>\d\d)-(?P<day>\d\d) {_CLOCK}"),
)
_ANY_TIME = re.compile(r"\d\d:\d\d:\d\d")

_TIME = r"\d\d:\d\d:\d\d(?:[.,]\d+)?"
_DATE_TIME = rf"\d{{4}}[-/]\d\d[-/]\d\d[T _]{_TIME}(?:Z|[+-]\d\d:?\d\d)?"
_PREFIX = re.compile(
    r"\[rank\s?(?P<rank>\d+)\]:?\s?"
    r"|\[default(?P<default>\d+)\]:?\s?"
    r"|\[\d+,(?P<mpi>\d+)\]\s?<std(?:out|err)>:\s?"
    r"|\((?P<actor>[\w.:<>-]+ pid=\d+|raylet|autoscaler)(?:, ip=[\d.]+)?\)\s?"
    rf"|\[{_DATE_TIME}(?:,? [A-Z]+\d*)*(?: \d+)*\]:?\s?"
    rf"|{_DATE_TIME}(?::\s|\s(?:- )?|$)"
    rf"|{_TIME}\s(?=\S)"
    rf"|\d\d-\d\d {_TIME} (?:\[[\w.]+:\d+\] ?)?"
    r"|\d{1,4}: (?=\S|\s{2})"
    r"|\[\d{4}\] (?=\s|\S)"
    r"|(?:ERROR|WARNING|INFO|CRITICAL)\s(?=\d\d-\d\d \d\d:)"
)
_RANK_GROUPS = ("rank", "default", "mpi")
_PREFIX_STARTS = frozenset("[(0123456789EWIC")
_RANK_IN_TEXT = re.compile(r"\[(?:PG [^\]]*)?(?:FSDP Engine )?Rank (?P<rank>\d+)\]", re.IGNORECASE)
_RANK_IN_PATH = (
    re.compile(r"(?:^|/)(?:attempt_\d+/)?(?P<rank>\d+)/std(?:out|err)\.log$"),
    re.compile(r"rank[_-]?(?P<rank>\d+)(?!\d)[^/]*$"),
    re.compile(r"rank[_-]?(?P<rank>\d+)/[^/]*$"),
    re.compile(r"(?:^|/)(?:std(?:out|err)|worker|log)[._-](?P<rank>\d+)(?:\.(?:log|txt))?$"),
)
MAX_PREFIXES = 6


@dataclass(frozen=True)
class CleanLine:
    """A line without its prefixes, and what they said."""

    text: str
    rank: int | None = None
    actor: str | None = None
    stamp: float | None = None


def read_stamp(text: str) -> float | None:
    """Return the first date and time of the text as seconds of a year, or None."""
    if not _ANY_TIME.search(text):
        return None
    for pattern in _STAMPS:
        match = pattern.search(text)
        if match:
            days = int(match["month"]) * 31 + int(match["day"])
            clock = int(match["hour"]) * 3600 + int(match["minute"]) * 60
            return days * 86400.0 + clock + float(match["second"].replace(",", "."))
    return None


@lru_cache(maxsize=8192)  # the lines around two errors are often the same
def clean_line(raw: str) -> CleanLine:
    """Strip escape codes, borders and known prefixes; keep rank, actor and time."""
    text = raw if raw.isprintable() else _ANSI.sub("", raw.replace("\r", " "))
    text = text.rstrip()
    stamp = read_stamp(text[:120])
    rank: int | None = None
    actor: str | None = None
    for _ in range(MAX_PREFIXES):
        match = _PREFIX.match(text) if text[:1] in _PREFIX_STARTS else None
        if match is None:
            break
        said = next((match[name] for name in _RANK_GROUPS if match[name]), None)
        rank = int(said) if said else rank
        actor = match["actor"] or actor
        text = text[match.end() :]
    if rank is None and "ank " in text:
        found = _RANK_IN_TEXT.search(text[:400])
        rank = int(found["rank"]) if found else None
    border = _RICH_BORDER.match(text) if text[:1] in "\u2502\u2503|" else None
    return CleanLine(border[1] if border else text, rank, actor, stamp)


def rank_of_path(path: str) -> int | None:
    """Return the rank that a log file's path tells, or None."""
    for pattern in _RANK_IN_PATH:
        match = pattern.search(path)
        if match:
            return int(match["rank"])
    return None
