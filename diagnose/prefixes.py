"""What launchers and loggers put before a line: taken off, and read for rank and time.

Knows torchrun (`[rank3]:`, `[default3]:`), torch's C++ logger (`[E1230 12:34:56.1 file.cpp:1]`),
Ray (`(Worker pid=7)`), srun (`3: `), mpirun (`[1,3]<stderr>:`), Python logging, NCCL and vLLM
headers. Times become seconds of a year without a name, since torch's headers do not say the year.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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

_PREFIXES = (
    re.compile(r"\[rank\s?(?P<rank>\d+)\]:?\s?"),
    re.compile(r"\[default(?P<rank>\d+)\]:?\s?"),
    re.compile(r"\[\d+,(?P<rank>\d+)\]\s?<std(?:out|err)>:\s?"),
    re.compile(r"\((?P<actor>[\w.:<>-]+ pid=\d+)(?:, ip=[\d.]+)?\)\s?"),
    re.compile(r"\((?P<actor>raylet|autoscaler)(?:, ip=[\d.]+)?\)\s"),
    re.compile(r"\d{1,4}: (?=\S|\s{2})"),
    re.compile(r"\[\d{4}\] (?=\s|\S)"),
    re.compile(rf"\[{_DATE}[T _]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?(?:,? [A-Z]+\d*)*(?: \d+)*\]:?\s?"),
    re.compile(rf"{_DATE}[T _]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?(?::\s|\s(?:- )?|$)"),
    re.compile(r"(?:ERROR|WARNING|INFO|CRITICAL)\s(?=\d\d-\d\d \d\d:)"),
    re.compile(rf"{_CLOCK.replace('P<', 'P<_')}?\s(?=\S)"),
    re.compile(r"(?:\d\d-\d\d )\d\d:\d\d:\d\d(?:[.,]\d+)? (?:\[[\w.]+:\d+\] ?)?"),
)
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


def clean_line(raw: str) -> CleanLine:
    """Strip escape codes, borders and known prefixes; keep rank, actor and time."""
    text = _ANSI.sub("", raw.replace("\r", " ")).rstrip()
    stamp = read_stamp(text[:120])
    rank: int | None = None
    actor: str | None = None
    for _ in range(MAX_PREFIXES):
        for pattern in _PREFIXES:
            match = pattern.match(text)
            if match and match.end() > 0:
                groups = match.groupdict()
                rank = int(groups["rank"]) if groups.get("rank") else rank
                actor = groups.get("actor") or actor
                text = text[match.end() :]
                break
        else:
            break
    if rank is None:
        said = _RANK_IN_TEXT.search(text[:400])
        rank = int(said["rank"]) if said else None
    border = _RICH_BORDER.match(text)
    return CleanLine(border[1] if border else text, rank, actor, stamp)


def rank_of_path(path: str) -> int | None:
    """Return the rank that a log file's path tells, or None."""
    for pattern in _RANK_IN_PATH:
        match = pattern.search(path)
        if match:
            return int(match["rank"])
    return None
