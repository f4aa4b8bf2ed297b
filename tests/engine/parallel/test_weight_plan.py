"""What a load will do, planned from names and shapes alone."""

from __future__ import annotations

import pytest
import torch

from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.models.load import build_meta_model
from fsdpbench.engine.models.preset_files import prepare_preset
from fsdpbench.engine.parallel.weight_files import SafetensorsWeights
from fsdpbench.engine.parallel.weight_plan import (
    MemoryCatalog,
    build_targets,
    check_tied_copies,
    choose_rows,
    plan_weights,
)
from fsdpbench.engine.parallel.weight_targets import TiedCopyTarget
from fsdpbench.errors import CheckpointError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def folder():
    return prepare_preset("tiny-qwen3", with_weights=True)


@pytest.fixture
def model(folder):
    return build_meta_model(TrainEngineConfig(path="tiny-qwen3"), folder)


def names_in(plan):
    return [piece.name for bucket in plan.buckets for piece in bucket.pieces]


def test_a_folder_is_planned_once_and_whole(model, folder):
    plan = plan_weights(model, SafetensorsWeights(folder), own_rows=False)
    shapes = {name: parameter.shape for name, parameter in model.named_hf_parameters()}
    assert sorted(names_in(plan)) == sorted(shapes)
    assert plan.num_bytes == 4 * sum(shape.numel() for shape in shapes.values())
    assert plan.copy_of == {}
    assert plan.unused == ()


def test_a_tied_copy_comes_last_and_other_tensors_do_not_travel(model):
    tensors = {name: torch.ones(p.shape) for name, p in model.named_hf_parameters()}
    catalog = MemoryCatalog({HEAD: tensors[EMBEDDING], "more": torch.ones(2), **tensors})
    plan = plan_weights(model, catalog, own_rows=False, bucket_bytes=20_000)
    names = names_in(plan)
    assert plan.copy_of == {HEAD: EMBEDDING}
    assert plan.unused == ("more",)
    first_copy = names.index(HEAD)
    assert set(names[first_copy:]) == {HEAD}
    assert set(names[:first_copy]) == set(tensors)


def test_tensors_at_hand_are_checked_like_files(model):
    tensors = {name: torch.ones(p.shape) for name, p in model.named_hf_parameters()}
    tensors.pop(EMBEDDING)
    tensors["model.norm.weight"] = torch.ones(3, dtype=torch.long)
    with pytest.raises(CheckpointError) as caught:
        plan_weights(model, MemoryCatalog(tensors), own_rows=False)
    for text in (
        f"missing {EMBEDDING}; of another shape: model.norm.weight (file [3]",
        "of no floating dtype: model.norm.weight (torch.int64)",
    ):
        assert text in str(caught.value)


def test_a_differing_copy_is_an_error(model):
    tensors = {name: torch.ones(p.shape) for name, p in model.named_hf_parameters()}
    catalog = MemoryCatalog({**tensors, HEAD: tensors[EMBEDDING]})
    plan = plan_weights(model, catalog, own_rows=False)
    targets = build_targets(model, plan)
    check_tied_copies(targets, plan)
    copy = targets[HEAD]
    assert isinstance(copy, TiedCopyTarget)
    copy.differs = True
    with pytest.raises(CheckpointError, match=f"{HEAD} differs from the weight"):
        check_tied_copies(targets, plan)


def test_rows_of_a_plain_parameter_are_all_rows():
    assert choose_rows(torch.ones(4, 2), own_rows=True) == slice(0, 4)
    assert choose_rows(torch.ones(4, 0), own_rows=True) == slice(0, 0)
    assert choose_rows(torch.tensor(1.0), own_rows=True) == slice(0, 1)
    assert choose_rows(torch.tensor(1.0), own_rows=False) == slice(0, 1)
