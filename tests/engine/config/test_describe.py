"""Every field has a sentence, and the generated pages are up to date."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from fsdpbench.engine.config.describe import build_run_schema, describe_fields
from fsdpbench.engine.config.strict import StrictModel, field_paths
from fsdpbench.engine.config.train import TrainEngineConfig

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def all_models(model=StrictModel):
    for child in model.__subclasses__():
        if child.__module__.startswith("fsdpbench."):
            yield child
        yield from all_models(child)


@pytest.mark.parametrize("model", list(all_models()), ids=lambda model: model.__name__)
def test_each_field_has_one_sentence(model):
    for name, field in model.model_fields.items():
        sentence = field.description or ""
        assert sentence.endswith("."), f"{name}: {sentence!r}"
        assert sentence[0].isupper() or sentence[0] == "`", f"{name}: {sentence!r}"


def test_rows_cover_every_leaf_with_type_and_default():
    rows = {row.path: row for row in describe_fields(TrainEngineConfig)}
    assert set(field_paths(TrainEngineConfig)) <= set(rows)
    row = rows["optimizer.lr"]
    assert (row.type, row.default, row.sentence) == ("float >= 0", "0.001", "Peak learning rate.")
    assert rows["optimizer.type"].type == '"adam", "adam_bf16", "sgd"'
    assert rows["mb_spec.max_tokens_per_mb"].type == "int >= 1 or null"
    assert rows["target_modules"].default == "[]"
    assert rows["fsdp"].default == "its defaults"


def test_the_schema_is_closed_and_described():
    schema = build_run_schema()
    engine = schema["$defs"]["TrainEngineConfig"]
    assert engine["additionalProperties"] is False
    assert set(engine["properties"]) == set(TrainEngineConfig.model_fields)
    assert engine["properties"]["dtype"]["enum"] == ["bfloat16", "float16", "float32"]
    names = [reference["$ref"].rpartition("/")[2] for reference in schema["anyOf"]]
    assert names == ["SFTRun", "AlgorithmRun", "TrainEngineConfig"]


@pytest.mark.parametrize("name", ["config.md", "run.schema.json"])
def test_the_committed_pages_are_what_the_generator_writes(generate, name):
    render = {"config.md": generate.render_config_page, "run.schema.json": generate.render_schema}
    written = (DOCS / name).read_text(encoding="utf-8")
    assert written == render[name](), "run `python docs/generate.py`"
