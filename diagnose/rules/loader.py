"""Reads the rule files that lie beside this module, once per process."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any

from pydantic import ValidationError

from fsdpbench.diagnose.rules.schema import Rule, RuleFile
from fsdpbench.errors import ConfigError, Violation


def parse_rules(text: str, where: str) -> tuple[Rule, ...]:
    """Parse one rule file; a malformed rule raises ConfigError naming the file and the rule."""
    try:
        data: dict[str, Any] = tomllib.loads(text)
        return RuleFile.model_validate(data).rule
    except (tomllib.TOMLDecodeError, ValidationError, ValueError) as error:
        raise ConfigError([Violation(where, "", f"is no valid rule file: {error}")]) from error


def check_unique(rules: Iterable[Rule]) -> None:
    """Raise ConfigError if two rules share an id."""
    seen: set[str] = set()
    for rule in rules:
        if rule.id in seen:
            raise ConfigError([Violation("rule.id", rule.id, "must be unique")])
        seen.add(rule.id)


def _is_rule_file(name: str) -> bool:
    return name.endswith(".toml") and name != "background.toml"


@cache
def load_rules() -> tuple[Rule, ...]:
    """Return every rule of the package, in file order."""
    folder = resources.files("fsdpbench.diagnose.rules")
    files = sorted(entry.name for entry in folder.iterdir() if _is_rule_file(entry.name))
    rules = tuple(
        rule
        for name in files
        for rule in parse_rules((folder / name).read_text(encoding="utf-8"), name)
    )
    check_unique(rules)
    return rules


@cache
def load_background() -> str:
    """Return lines of healthy logs: what the search for literals should not stop at."""
    file = resources.files("fsdpbench.diagnose.rules") / "background.toml"
    text: str = tomllib.loads(file.read_text(encoding="utf-8"))["text"]
    return text
