"""What an explanation rule may say: a frozen, validated record read from TOML.

A rule is data. It names literals that its line must hold, optional expressions that capture
numbers, what must or must not stand around it, and the verdict it supports. It never runs code.
"""

from __future__ import annotations

import re
import string
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fsdpbench.bench.records import FailureClass
from fsdpbench.diagnose.arithmetic import names_in


class Role(StrEnum):
    """What a matching line means for the run."""

    CAUSE = "cause"  # can be the first failure
    SYMPTOM = "symptom"  # a follow-up; a verdict only if no cause is found
    ECHO = "echo"  # repeats another error; never a verdict
    HINT = "hint"  # says which rank failed first; never a verdict
    BENIGN = "benign"  # harmless, however it looks


def check_expression(text: str) -> None:
    """Raise ValueError for what is no regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from error


class Pattern(BaseModel):
    """One wording: a literal that the line must contain, and an expression over it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    has: str = Field(min_length=4)
    """Literal text of the line; the scan looks for it before anything else."""
    regex: str | None = None
    """Searched in the cleaned line; named groups are captured. None: the literal is enough."""
    span: int = Field(default=0, ge=0, le=24)
    """How many following lines the expression may also see, joined by newlines."""

    @model_validator(mode="after")
    def _compile(self) -> Pattern:
        if self.regex is not None:
            check_expression(self.regex)
        return self


class Rule(BaseModel):
    """One kind of failure, symptom or harmless warning."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    failure_class: FailureClass = Field(alias="class")
    role: Role = Role.CAUSE
    priority: int = Field(default=50, ge=0, le=100)
    """Among matches of one failure the highest wins: the more specific, the higher."""
    confidence: float = Field(default=0.9, ge=0, le=1)
    phase: str | None = None
    match: tuple[Pattern, ...] = Field(min_length=1)
    """Any of these."""
    near: tuple[str, ...] = ()
    """Expressions, any of which must be found within the 60 lines before or `ahead` after."""
    ahead: int = Field(default=16, ge=0, le=60)
    """How many following lines count as near."""
    not_near: tuple[str, ...] = ()
    """Expressions, none of which may be found there."""
    log_has: tuple[str, ...] = ()
    """Literals, any of which must stand somewhere in the logs."""
    log_lacks: tuple[str, ...] = ()
    """Literals, none of which may stand anywhere in the logs."""
    derive: dict[str, str] = {}
    """Name -> arithmetic over captured numbers and earlier names."""
    when: str | None = None
    """Arithmetic condition; a false one drops the match."""
    min_hits: int = Field(default=1, ge=1)
    """Fewer matching lines than this are no finding."""
    grows: str | None = None
    """A captured number that must rise from the first to the last matching line."""
    cleared_by_progress: bool = False
    """A training step logged after the line shows that the run survived it."""
    blames_writer: bool = True
    """The rank that wrote the line is the one that failed; false where it only says what it saw."""
    cause: tuple[str, ...] = ()
    """Sentences with {captures}; the first one whose captures are all known is used."""
    remedies: tuple[str, ...] = ()
    """What to do, best first: a config change or a command."""
    wording: str = ""
    """Versions of the software whose wording was read or provoked."""

    @model_validator(mode="after")
    def _check(self) -> Rule:
        for expression in (*self.near, *self.not_near):
            check_expression(expression)
        verdict = self.role in (Role.CAUSE, Role.SYMPTOM)
        if verdict and not (self.cause and self.remedies):
            raise ValueError(f"rule {self.id}: a {self.role} needs a cause and remedies")
        known = self._known_names()
        for text in self.cause:
            _check_names(self.id, {n for _, n, _, _ in string.Formatter().parse(text) if n}, known)
        for text in (*self.derive.values(), *([self.when] if self.when else [])):
            _check_names(self.id, names_in(text), known)
        if self.grows is not None:
            _check_names(self.id, {self.grows}, known)
        return self

    def _known_names(self) -> set[str]:
        known = set(self.derive)
        for pattern in self.match:
            if pattern.regex is not None:
                known |= set(re.compile(pattern.regex).groupindex)
        return known


def _check_names(rule_id: str, used: set[str], known: set[str]) -> None:
    unknown = used - known
    if unknown:
        raise ValueError(f"rule {rule_id}: {sorted(unknown)} is captured or derived nowhere")


class RuleFile(BaseModel):
    """One TOML file: a list of rules."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rule: tuple[Rule, ...]
