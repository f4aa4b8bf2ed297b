"""Shows candidate lines to the rules and keeps what matched: hits, error signs, known literals.

Repeats cost almost nothing: lines that differ in digits only are looked at a few times per rank.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice

from fsdpbench.diagnose.arithmetic import Value, evaluate
from fsdpbench.diagnose.logs import Candidate, Line, LogScanner, LogSummary
from fsdpbench.diagnose.rules.loader import load_background, load_rules
from fsdpbench.diagnose.rules.schema import Pattern, Role, Rule

MAX_REPEATS = 6  # of lines alike but for digits, per stream
MAX_HITS = 4000  # the first ones matter
MAX_ERRORS = 400
QUIET_LINES = 100  # training that goes on for so many lines after an error has survived it
_DIGITS = re.compile(r"0x[0-9a-f]+|\d+")
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?(?P<name>[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure|Iteration|Warning))"
    r"(?:\(\w+\))?(?::\s(?P<message>.*)|$)"
)
_TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>\S+))?')
_SOURCE = re.compile(
    r"\s*(?:raise|return|assert|warnings\.warn\(|logger\.\w+\() ?\S"
)  # code in a traceback
_LOUD = re.compile(r"(?:^|[\s\[|])(?:ERROR|CRITICAL|FATAL)(?:[\s\]|:]|$)")
_LITERALS = ("Traceback", "ERROR", "CRITICAL", "FATAL", "Error", "Exception", "Interrupt")


@dataclass(frozen=True)
class Hit:
    """One rule on one line, with what it captured."""

    rule: Rule
    line: Line
    values: dict[str, Value]
    stamp: float | None
    phase: str | None = None  # the rule's, or what the traceback above shows


@dataclass(frozen=True)
class ErrorSign:
    """An error that no rule knows: an exception or a loud log line."""

    line: Line
    stamp: float | None
    is_exception: bool
    raised_in: str | None = None  # innermost frame of its traceback, as `file:line in function`


@dataclass
class Findings:
    """All that the scan of one or more logs brought up."""

    hits: list[Hit] = field(default_factory=list)
    errors: list[ErrorSign] = field(default_factory=list)
    literals: set[str] = field(default_factory=set)
    logs: dict[str, LogSummary] = field(default_factory=dict)
    last_trouble: dict[str, int] = field(default_factory=dict)
    """File -> line of the last error in it, repeats included."""


_PHASES = (  # the first one found in the frames wins
    ("weight_sync", r"\bin _?(?:update_weights|init_weights_update_group|refit|sync_weights)"),
    ("rollout", r"\bin (?:wake_up|generate_sequences|generate|rollout_batch|resume_generation)\b"),
    ("save", r"\bin (?:_?save\w*|dcp_save|async_save)\b"),
    ("load", r"\bin (?:from_pretrained|_?load_\w+|load|safe_open|load_file|dcp_load)\b"),
    ("optimizer", r"\bin (?:optimizer_step|_multi_tensor_\w+|_single_tensor_\w+|_fused_adamw?\w*)\b"
                  r"|torch/optim/\w+\.py"),
    ("clip", r"\bin (?:clip_grad_norm_?|fsdp2_clip_grad_norm|_get_total_norm)\b"),
    ("backward", r"\bin (?:backward|_engine_run_backward)\b"),
    ("forward", r"\bin (?:forward|_call_impl|_wrapped_call_impl|forward_batch|eval_batch)\b"),
    ("init", r"\bin (?:init_process_group|init_device_mesh|initialize|create_process_group)\b"),
)  # fmt: skip


def guess_phase(frames: Sequence[str]) -> str | None:
    """Return the phase of a step that the traceback's frames show, or None."""
    text = "\n".join(frame for frame in frames if "File " in frame)
    for phase, expression in _PHASES:
        if text and compile_expression(expression).search(text):
            return phase
    return None


@cache
def compile_expression(expression: str) -> re.Pattern[str]:
    """Compile once per process; rules share many expressions."""
    return re.compile(expression)


def near_text(candidate: Candidate, ahead: int) -> str:
    """Return the text around a line in which a rule looks for company."""
    return "\n".join([*candidate.before, candidate.line.text, *candidate.after[:ahead]])


class Matcher:
    """Collects findings over any number of logs."""

    def __init__(self, rules: Sequence[Rule], background: str = "") -> None:
        self.findings = Findings()
        self._patterns: dict[str, list[tuple[Pattern, Rule]]] = defaultdict(list)
        for rule in rules:
            for pattern in rule.match:
                self._patterns[pattern.has].append((pattern, rule))
        self._facts = {text for rule in rules for text in (*rule.log_has, *rule.log_lacks)}
        self._seen: dict[tuple[object, str], tuple[int, bool]] = {}
        literals = {*self._patterns, *self._facts, *_LITERALS}
        self.scanner = LogScanner(literals, background, self.show)

    def show(self, candidate: Candidate) -> None:
        """Match one line; called by the scanner."""
        self.findings.literals |= candidate.literals & self._facts
        known = sorted(text for text in candidate.literals if text in self._patterns)
        if not known and len(self.findings.errors) >= MAX_ERRORS:
            return
        line = candidate.line
        if _SOURCE.match(line.text):
            return
        key = (line.stream, _DIGITS.sub("#", line.text[:300]))
        count, is_trouble = self._seen.get(key, (0, False))
        if count < MAX_REPEATS:
            is_trouble |= self._take(candidate, known)
        if len(self._seen) > MAX_HITS * 4:
            self._seen.clear()
        self._seen[key] = count + 1, is_trouble
        if is_trouble:
            self.findings.last_trouble[line.file] = line.number

    def _take(self, candidate: Candidate, known: Sequence[str]) -> bool:
        """Keep what the rules say of a line, or an unknown error in it; say if it is trouble."""
        line, roles = candidate.line, set()
        for pattern, rule in (pair for text in known for pair in self._patterns[text]):
            values = _match(candidate, pattern, rule)
            if values is not None and len(self.findings.hits) < MAX_HITS:
                roles.add(rule.role)
                phase = rule.phase or guess_phase(candidate.before)
                self.findings.hits.append(Hit(rule, line, values, candidate.find_stamp(), phase))
        sign = None if roles else _read_error(candidate)
        if sign is not None and len(self.findings.errors) < MAX_ERRORS:
            self.findings.errors.append(sign)
        return sign is not None or bool(roles - {Role.BENIGN})


def _match(candidate: Candidate, pattern: Pattern, rule: Rule) -> dict[str, Value] | None:
    values: dict[str, Value] = {}
    if pattern.regex is not None:
        text = "\n".join([candidate.line.text, *islice(candidate.after, pattern.span)])
        match = compile_expression(pattern.regex).search(text)
        if match is None:
            return None
        values.update({name: value for name, value in match.groupdict().items() if value})
    if rule.near or rule.not_near:
        around = near_text(candidate, rule.ahead)
        if rule.near and not any(compile_expression(e).search(around) for e in rule.near):
            return None
        if any(compile_expression(e).search(around) for e in rule.not_near):
            return None
    return values if _compute(rule, values) else None


def _compute(rule: Rule, values: dict[str, Value]) -> bool:
    """Add the derived values; False if the rule's condition does not hold or cannot be computed."""
    for name, text in rule.derive.items():
        try:
            values[name] = evaluate(text, values)
        except ValueError:
            continue  # a wording without that number; the cause falls back to a plainer sentence
    if rule.when is None:
        return True
    try:
        return bool(evaluate(rule.when, values))
    except ValueError:
        return False


def _read_error(candidate: Candidate) -> ErrorSign | None:
    text = candidate.line.text
    match = _EXCEPTION.match(text)
    if match and not match["name"].endswith(("Warning", "StopIteration")):
        frames = [found for found in map(_FRAME.match, candidate.before) if found]
        where = None
        if frames:
            last = frames[-1]
            where = f"{last['file']}:{last['line']} in {last['function'] or '<module>'}"
        elif match["message"] is None:
            return None  # a lone word that looks like an exception's name
        return ErrorSign(candidate.line, candidate.find_stamp(), True, where)
    if _TRACEBACK in text or _LOUD.search(text[:200]):
        return ErrorSign(candidate.line, candidate.find_stamp(), False)
    return None


def keep_valid(hits: Iterable[Hit], findings: Findings) -> list[Hit]:
    """Drop hits whose rule asks for more than one line shows: other literals, repeats, growth."""
    by_rule: dict[str, list[Hit]] = defaultdict(list)
    for hit in hits:
        by_rule[hit.rule.id].append(hit)
    kept: list[Hit] = []
    for group in by_rule.values():
        rule = group[0].rule
        if rule.log_has and not any(text in findings.literals for text in rule.log_has):
            continue
        if any(text in findings.literals for text in rule.log_lacks):
            continue
        if len(group) < rule.min_hits or not _grows(rule, group):
            continue
        kept += [
            hit for hit in group if not (rule.cleared_by_progress and _survived(hit, findings))
        ]
    return sorted(kept, key=lambda hit: hit.line.order)


def _grows(rule: Rule, group: list[Hit]) -> bool:
    if rule.grows is None:
        return True
    numbers = [float(hit.values[rule.grows]) for hit in group if rule.grows in hit.values]
    return len(numbers) >= 2 and numbers[-1] > numbers[0]


def _survived(hit: Hit, findings: Findings) -> bool:
    return findings.logs[hit.line.file].last_progress_line > hit.line.number


def drop_survived(causes: Iterable[Hit], findings: Findings) -> list[Hit]:
    """Drop errors after which training went on for long and in quiet: they were handled.

    A run that is slow, or whose numbers are broken, goes on all the same: such causes stay.
    """
    return [
        hit
        for hit in causes
        if hit.rule.failure_class in ("performance", "numeric")
        or findings.logs[hit.line.file].last_progress_line
        < findings.last_trouble.get(hit.line.file, 0) + QUIET_LINES
    ]


def hits_of_role(hits: Iterable[Hit], role: Role) -> list[Hit]:
    """Return the hits of rules with this role."""
    return [hit for hit in hits if hit.rule.role is role]


def build_matcher(rules: Sequence[Rule] | None = None) -> Matcher:
    """Return a matcher with the given rules, or with those of the package."""
    return Matcher(load_rules() if rules is None else rules, load_background())
