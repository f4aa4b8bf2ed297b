"""Configuration classes as documentation: rows for tables and help, and the JSON schema of a run.

Everything comes from the classes: the sentence of a field is the string literal under it.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic.json_schema import models_json_schema

from fsdpbench.engine.config.run import RUN_KINDS
from fsdpbench.engine.config.strict import StrictModel, nested_model
from fsdpbench.engine.config.train import TrainEngineConfig


@dataclass(frozen=True)
class FieldHelp:
    """One field as a reader sees it."""

    path: str
    type: str
    default: str
    sentence: str


def describe_fields(model: type[StrictModel], prefix: str = "") -> Iterator[FieldHelp]:
    """Yield every field in order, the fields of a section after the section itself."""
    for name, field in model.model_fields.items():
        path = prefix + name
        nested = nested_model(field.annotation)
        yield FieldHelp(
            path=path,
            type=_describe_type(field),
            default=_describe_default(field),
            sentence=" ".join((field.description or "").split()),
        )
        if nested is not None and issubclass(nested, StrictModel):
            yield from describe_fields(nested, f"{path}.")


def build_run_schema(*more: type[StrictModel]) -> dict[str, Any]:
    """Return the JSON schema of a configuration file: a run of any kind, or a bare engine.

    `more` are the kinds of run that other layers own.
    """
    models: tuple[type[StrictModel], ...] = (*RUN_KINDS.values(), *more, TrainEngineConfig)
    models = tuple(dict.fromkeys(models))
    references, definitions = models_json_schema([(model, "validation") for model in models])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "fsdpbench configuration",
        "anyOf": list(references.values()),
        **definitions,
    }


def _describe_default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, StrictModel):
        return "its defaults"
    return "[]" if value == () else json.dumps(value)


def _describe_type(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(rule, name)}"
        for rule in field.metadata
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if getattr(rule, name, None) is not None
    ]
    return " ".join([_name_type(field.annotation), ", ".join(bounds)]).strip()


def _name_type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        info = FieldInfo.from_annotation(annotation)
        return _describe_type(info)
    if origin is Literal:
        return ", ".join(json.dumps(value) for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_name_type(argument) for argument in arguments)
    if origin is tuple:
        return "list of " + _name_type(arguments[0])
    if origin is list:
        return "list"
    if origin is dict:
        return "section"
    if annotation is type(None):
        return "null"
    return "section" if nested_model(annotation) else str(annotation.__name__)
