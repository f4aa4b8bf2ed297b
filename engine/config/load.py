"""From a YAML file and dotted overrides to a checked configuration; messages name file and line.

Scalars follow YAML 1.2, as people expect them: `1e-4` is a number, `yes` and `010` are strings. A
key given twice is an error.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from fsdpbench.engine.config.run import RunConfig, build_run_config
from fsdpbench.engine.config.strict import copy_sections, set_path
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.errors import ConfigError, Violation

# tag, the spellings that have it, and their first characters
_SCALARS = (
    ("null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
    ("bool", r"true|True|TRUE|false|False|FALSE", tuple("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", tuple("-+0123456789")),
    (
        "float",
        r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.inf)|\.nan",
        tuple("-+.0123456789"),
    ),
    ("merge", r"<<", ("<",)),
)


class _Loader(yaml.SafeLoader):
    """Safe loader with YAML 1.2 scalars that refuses duplicate keys."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (pyyaml declares it without ClassVar)
        first: [
            (f"tag:yaml.org,2002:{name}", re.compile(rf"(?:{pattern})\Z"))
            for name, pattern, firsts in _SCALARS
            if first in firsts
        ]
        for first in {first for _, _, firsts in _SCALARS for first in firsts}
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping; an empty file is an empty mapping."""
    return _read_yaml(Path(path))[0]


def parse_yaml(text: str) -> Any:
    """Read one YAML value as configuration files are read; raises yaml.YAMLError."""
    return _load_document(text)[0]


def apply_overrides(data: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy with `a.b=value` set, the value read as YAML (`null`, `true`, `[a, b]`)."""
    result = copy_sections(data)
    problems: list[Violation] = []
    for text in overrides:
        try:
            set_path(result, *_parse_override(text))
        except ConfigError as error:
            problems += error.violations
    if problems:
        raise ConfigError(problems)
    return result


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> TrainEngineConfig | RunConfig:
    """Load a run (a file with `kind`) or a bare engine configuration, overrides applied."""
    file, overrides = Path(path), list(overrides)
    data, places = _read_yaml(file)
    data = apply_overrides(data, overrides)
    places |= {text.partition("=")[0].strip(): f"override {text!r}" for text in overrides}
    try:
        return build_config(data)
    except ConfigError as error:
        raise ConfigError([_add_place(v, places) for v in error.violations]) from None


def build_config(data: Mapping[str, Any]) -> TrainEngineConfig | RunConfig:
    """Build a run from a mapping that has a `kind`, a bare engine configuration otherwise."""
    if "kind" in data:
        return build_run_config(data)
    return TrainEngineConfig.model_validate(data)


def _parse_override(text: str) -> tuple[str, Any]:
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not all(path.split(".")):
        raise ConfigError([Violation("override", repr(text), "must read dotted.path=value")])
    if not value.strip():
        raise ConfigError(
            [Violation(path, "", "has no value in the override", "write null, or '' for no text")]
        )
    try:
        return path, parse_yaml(value)
    except yaml.YAMLError as error:
        raise ConfigError([Violation(path, repr(value), f"is no YAML: {error}")]) from None


def _load_document(text: str) -> tuple[Any, dict[str, int]]:
    """Return the value of the only document and the line of each dotted path in it."""
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    if root is None:
        return None, {}
    lines = dict(_list_lines(root))
    return loader.construct_document(root), lines


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the mapping and, for each dotted path in it, `file:line`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Violation(str(path), "", f"cannot be read: {error}")]) from None
    try:
        data, lines = _load_document(text)
    except yaml.YAMLError as error:
        raise ConfigError([_describe_yaml_error(path, error)]) from None
    if data is None:
        return {}, {}
    if not isinstance(data, dict):
        kind = type(data).__name__
        raise ConfigError([Violation(f"{path}:1", kind, "must be a mapping of fields")])
    return data, {where: f"{path}:{line}" for where, line in lines.items()}


def _describe_yaml_error(path: Path, error: yaml.YAMLError) -> Violation:
    mark = getattr(error, "problem_mark", None)
    where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
    problem = getattr(error, "problem", None) or str(error)
    return Violation(where, "", f"is no valid YAML: {problem}")


def _list_lines(
    node: yaml.Node, prefix: str = "", above: tuple[yaml.Node, ...] = ()
) -> Iterator[tuple[str, int]]:
    """Yield dotted path and line (from 1) of every key; refuse an anchor that contains itself."""
    if any(node is parent for parent in above):
        raise yaml.constructor.ConstructorError(
            None, None, "an anchor contains itself", node.start_mark
        )
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = f"{prefix}{key.value}" if isinstance(key, yaml.ScalarNode) else prefix
            yield path, key.start_mark.line + 1
            yield from _list_lines(value, f"{path}.", (*above, node))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            path = f"{prefix}{index}"
            yield path, value.start_mark.line + 1
            yield from _list_lines(value, f"{path}.", (*above, node))


def _add_place(violation: Violation, places: Mapping[str, str]) -> Violation:
    """Append where the value was written: the line of the path, or of the section around it."""
    parts = violation.where.split(".")
    for length in range(len(parts), 0, -1):
        place = places.get(".".join(parts[:length]))
        if place is not None:
            allowed = f"{violation.allowed} ({place})".strip()
            return replace(violation, allowed=allowed)
    return violation
