"""Explains a failure from its logs or its run folder: one verdict, and `unknown` is an answer."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

from fsdpbench.bench.records import Record, Verdict
from fsdpbench.diagnose.decide import decide
from fsdpbench.diagnose.log_files import find_logs, open_log
from fsdpbench.diagnose.matching import build_matcher
from fsdpbench.diagnose.rules.schema import Rule
from fsdpbench.diagnose.trials import (
    TrialVerdict,
    explain_run,
    explain_trial,
    is_run_folder,
    is_trial_folder,
)
from fsdpbench.errors import ConfigError, Violation


def explain_stream(stream: BinaryIO, file: str, rules: Sequence[Rule] | None = None) -> Verdict:
    """Explain one log read from an open binary stream; `file` is its name in the evidence."""
    matcher = build_matcher(rules)
    matcher.findings.logs[file] = matcher.scanner.scan(stream, file)
    return decide(matcher.findings)


def explain_text(text: str, file: str = "-", rules: Sequence[Rule] | None = None) -> Verdict:
    """Explain a log given as text."""
    return explain_stream(io.BytesIO(text.encode("utf-8", errors="replace")), file, rules)


def explain_files(paths: Iterable[Path], rules: Sequence[Rule] | None = None) -> Verdict:
    """Explain several logs of one run together; raises OSError for a file that cannot be read."""
    matcher = build_matcher(rules)
    for path in paths:
        with open_log(path) as stream:
            matcher.findings.logs[str(path)] = matcher.scanner.scan(stream, str(path))
    return decide(matcher.findings)


def explain_run_for_record(trial_dir: Path, record: Record) -> Verdict | None:
    """Explain one trial for the runner, which calls this when a trial did not end well."""
    return explain_trial(trial_dir, record)


def explain_sources(
    sources: Sequence[str], stdin: BinaryIO | None
) -> tuple[Verdict, list[TrialVerdict]]:
    """Explain what the command line names: logs, `-`, a trial, a run, or a folder of logs.

    Several files and folders of logs are one run. Raises OSError for what cannot be read and
    ConfigError for a folder without logs.
    """
    sources = list(dict.fromkeys(sources))  # a log given twice is one log
    if "-" in sources and stdin is None:
        raise ConfigError([Violation("-", "standard input is closed", "", "name a log file")])
    if len(sources) == 1:
        only = sources[0]
        if only == "-" and stdin is not None:
            return explain_stream(stdin, "-"), []
        if is_run_folder(Path(only)):
            return explain_run(Path(only))
        if is_trial_folder(Path(only)):
            return explain_trial(Path(only)), []
    matcher = build_matcher()
    for source in sources:
        for path in [Path(source)] if source == "-" else _list_files(Path(source)):
            with stdin if source == "-" and stdin else open_log(path) as stream:
                matcher.findings.logs[str(path)] = matcher.scanner.scan(stream, str(path))
    return decide(matcher.findings), []


def _list_files(path: Path) -> list[Path]:
    return find_logs(path) if path.is_dir() else [path]
