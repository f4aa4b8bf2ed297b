"""The base of every configuration class: frozen, no unknown key, all violations at once.

A failed construction, direct or through a parent, raises one `ConfigError` that holds every
broken field and every broken rule with its dotted path. Rules are methods marked with
`@rule(fields...)`: a rule still speaks when other fields are wrong, and keeps silent when a field
that it reads is wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    TypeAdapter,
    ValidationError,
)

from fsdpbench.errors import ConfigError, Violation, list_names

# YAML and Python give typed scalars, so "3" or true never stands for a number here.
Flag = StrictBool
Integer = StrictInt
Count = Annotated[StrictInt, Field(ge=1)]
NonNegativeInt = Annotated[StrictInt, Field(ge=0)]
Real = Annotated[float, Field(strict=True)]
NonNegative = Annotated[float, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(strict=True, gt=0)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]
BelowOne = Annotated[float, Field(strict=True, ge=0, lt=1)]

RuleMethod = TypeVar("RuleMethod", bound=Callable[[Any], Violation | None])


def rule(*reads: str) -> Callable[[RuleMethod], RuleMethod]:
    """Mark a method as a rule over these dotted paths; it returns a Violation or None."""

    def mark(method: RuleMethod) -> RuleMethod:
        method.rule_reads = reads  # type: ignore[attr-defined]
        return method

    return mark


class StrictModel(BaseModel):
    """Frozen pydantic model whose every failure is a `ConfigError`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )
    rules: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Collect the names of the rules, the parents' first."""
        members = {
            name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()
        }
        cls.rules = tuple(name for name, value in members.items() if hasattr(value, "rule_reads"))

    def __init__(self, /, **data: Any) -> None:
        data, violations = _drop_bad_keys(data)
        try:
            super().__init__(**data)
        except ValidationError as error:
            violations += _list_violations(type(self), error)
            violations += _judge_the_rest(type(self), data, violations)
        else:
            violations += _apply_rules(self)
        if violations:
            raise ConfigError(violations)

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError([Violation(name, repr(value), "is frozen", "build anew: with_changes")])

    @classmethod
    def model_validate(cls, obj: Any, **kwargs: Any) -> Self:
        """Build from a mapping; an instance is returned as it is."""
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, Mapping):
            raise ConfigError([Violation(cls.__name__, repr(obj), "must be a mapping of fields")])
        data, violations = _drop_bad_keys({"": obj})
        if violations:
            raise ConfigError(violations)
        return cls(**data[""])

    def with_changes(self, changes: Mapping[str, Any]) -> Self:
        """Rebuild with values set at dotted paths; the result passes every check again."""
        data = self.model_dump(exclude_unset=True)
        for path, value in changes.items():
            set_path(data, path, value)
        return type(self)(**data)


def set_path(data: dict[str, Any], path: str, value: Any) -> None:
    """Set a value in nested dicts; dicts that are missing (or null) on the way are made."""
    *parents, last = path.split(".")
    node = data
    for depth, name in enumerate(parents):
        child = node.get(name)
        if child is None:
            child = node[name] = {}
        elif not isinstance(child, dict):
            where = ".".join(parents[: depth + 1])
            raise ConfigError([Violation(path, repr(value), f"{where} holds no fields")])
        node = child
    node[last] = value


def copy_sections(value: Any) -> Any:
    """Copy nested mappings (and lists) so that setting or dropping a path leaves the original."""
    if isinstance(value, Mapping):
        return {key: copy_sections(item) for key, item in value.items()}
    return copy.copy(value) if isinstance(value, list) else value


def place_inside(section: str, violation: Violation) -> Violation:
    """Return the violation of a section as its parent reports it."""
    return replace(violation, where=f"{section}.{violation.where}".rstrip("."))


def field_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every leaf field of a model class."""
    for name, field in model.model_fields.items():
        nested = nested_model(field.annotation)
        if nested is None:
            yield prefix + name
        else:
            yield from field_paths(nested, f"{prefix}{name}.")


def nested_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model class of a field type (`X` or `X | None`), None for a leaf field."""
    for choice in (annotation, *get_args(annotation)):
        if isinstance(choice, type) and issubclass(choice, BaseModel):
            return choice
    return None


def _drop_bad_keys(data: dict[str, Any]) -> tuple[dict[str, Any], list[Violation]]:
    """Take keys that are no strings out of the sections directly below: no field can have them."""
    good, bad = dict(data), []
    for section, value in data.items():
        if isinstance(value, Mapping) and not all(isinstance(key, str) for key in value):
            good[section] = {key: item for key, item in value.items() if isinstance(key, str)}
            wrong = [key for key in value if not isinstance(key, str)]
            found = [Violation(repr(key), "", "field names are strings") for key in wrong]
            bad += [place_inside(section, v) if section else v for v in found]
    return good, bad


def _apply_rules(model: StrictModel, tainted: Sequence[str] = ()) -> list[Violation]:
    found = []
    for name in model.rules:
        method = getattr(model, name)
        if any(_overlaps(path, bad) for path in method.rule_reads for bad in tainted):
            continue
        violation = method()
        if violation is not None:
            found.append(violation)
    return found


def _overlaps(path: str, other: str) -> bool:
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


def _judge_the_rest(
    cls: type[StrictModel], data: Mapping[str, Any], violations: Sequence[Violation]
) -> list[Violation]:
    """Apply the rules that read no wrong field, on a probe with defaults in their place."""
    tainted = [violation.where for violation in violations]
    rest = copy_sections(data)
    for where in tainted:
        _drop(rest, where.split("."))
    values = {}
    for name, field in cls.model_fields.items():
        if name in rest:
            try:
                values[name] = TypeAdapter(field.rebuild_annotation()).validate_python(rest[name])
            except ValidationError:  # a default in a wrong field's place broke the section
                tainted.append(name)
        elif not field.is_required():
            values[name] = field.get_default(call_default_factory=True)
    return _apply_rules(cls.model_construct(**values), tainted)


def _drop(data: dict[str, Any], path: list[str]) -> None:
    head, *tail = path
    child = data.get(head)
    if tail and isinstance(child, dict):
        _drop(child, tail)
    else:
        data.pop(head, None)


def _list_violations(cls: type[StrictModel], error: ValidationError) -> list[Violation]:
    found: list[Violation] = []
    for line in error.errors(include_url=False):
        path = ".".join(str(part) for part in line["loc"])
        nested = line.get("ctx", {}).get("error")
        if isinstance(nested, ConfigError):
            found += [place_inside(path, inner) for inner in nested.violations]
        else:
            found.append(_translate(cls, path, line["type"], line["msg"], line["input"]))
    return _suggest_elsewhere(cls, found)


UNKNOWN = "there is no such field"


def _translate(cls: type[StrictModel], path: str, kind: str, message: str, value: Any) -> Violation:
    name = path.rpartition(".")[2]
    if kind == "extra_forbidden":
        close = get_close_matches(name, cls.model_fields, n=1, cutoff=0.6)
        return Violation(path, "", UNKNOWN, f"did you mean {close[0]}?" if close else "")
    if kind == "missing":
        return Violation(path, "", "is required")
    allowed = message.removeprefix("Value error, ").replace("Input should be", "must be")
    return Violation(path, repr(value), allowed)


def _suggest_elsewhere(cls: type[StrictModel], found: list[Violation]) -> list[Violation]:
    """Point an unknown key at the field of that name in another section, if there is one."""
    paths = list(field_paths(cls))
    return [
        replace(v, remedy=_suggest(cls, paths, v)) if v.allowed == UNKNOWN else v for v in found
    ]


def _suggest(cls: type[StrictModel], paths: Sequence[str], violation: Violation) -> str:
    """Choose the field of this very name, else the section's own near one, else any near one."""
    name = violation.where.rpartition(".")[2]
    same = [path for path in paths if path.rpartition(".")[2] == name]
    if not same and violation.remedy.startswith("did you mean"):
        return violation.remedy
    close = same or get_close_matches(violation.where, paths, n=1, cutoff=0.7)
    if close:
        return f"did you mean {close[0]}?"
    return violation.remedy or f"fields: {list_names(cls.model_fields, limit=8)}"
