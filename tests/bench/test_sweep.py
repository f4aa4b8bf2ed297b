import os

import pytest

from fsdpbench.bench.presets import DEFAULT_MODELS
from fsdpbench.bench.space import SweepSpace
from fsdpbench.bench.sweep import merge_at, plan_sweep
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.errors import ConfigError


def plan(axes=None, num_gpus=0, **fields):
    return plan_sweep(SweepSpace(axes=axes or {}, **fields), num_gpus)


def reasons(point):
    return "\n".join(str(violation) for violation in point.violations)


def test_the_default_sweep_of_a_laptop():
    made = plan()
    assert (made.device, made.world_size, made.model) == ("cpu", 2, "tiny-qwen3")
    assert len(made.points) == made.num_valid == 8
    assert {point.spec.world_size for point in made.points} == {1, 2}
    for point in made.points:
        config = TrainEngineConfig(**point.spec.config)
        assert config.init_from_scratch
        assert config.dtype == "float32"
        assert config.optimizer is not None
        assert config.parallel_strategy.world_size == point.spec.world_size


@pytest.mark.parametrize("num_gpus", [1, 2, 3, 4, 8])
def test_the_default_sweep_uses_all_gpus(num_gpus):
    made = plan(num_gpus=num_gpus)
    assert (made.device, made.model) == ("cuda", DEFAULT_MODELS["cuda"])
    assert made.num_valid == len(made.points) >= (4 if num_gpus == 3 else 8)
    assert {point.spec.world_size for point in made.points} == {num_gpus}


def test_invalid_points_keep_all_their_reasons():
    made = plan({"parallel": ["fsdp:d1", "fsdp:t3", "fsdp:d4"], "optimizer.lr": [-1.0, 1e-4]})
    assert len(made.points) == 6
    assert made.num_valid == 1
    by_axes = {(p.axes["parallel"], p.axes["optimizer.lr"]): p for p in made.points}
    assert "optimizer.lr" in reasons(by_axes["fsdp:d1", -1.0])
    three = reasons(by_axes["fsdp:t3", 1e-4])
    assert "must divide num_attention_heads=8" in three
    assert "needs 3 processes and this sweep has 2; choose smaller degrees, or pass" in three
    assert "--world-size 4" in reasons(by_axes["fsdp:d4", 1e-4])


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"backend": ["fsdp:p2"]}, "pipeline"),
        ({"backend": ["fsdp:x1"]}, "position 5"),
        ({"steps": [0]}, "workload.steps"),
        ({"workload.tokens_per_step": ["many"]}, "workload.tokens_per_step"),
        ({"fault": ["explode@1"]}, "fault"),
        ({"is_critic": [True]}, "not available yet"),
        ({"optimizer": [None]}, "builds an engine for inference"),
        ({"model": ["no-such-model"]}, "is no preset"),
    ],
)
def test_each_kind_of_mistake_makes_its_point_invalid(axes, message):
    (point,) = plan(axes).points
    assert point.spec is None
    assert message in reasons(point)


def test_mistakes_of_the_space_itself_are_raised():
    with pytest.raises(ConfigError, match="must not exceed the 2 GPUs"):
        plan(num_gpus=2, world_size=4)
    with pytest.raises(ConfigError, match="no GPU was found"):
        plan(device="cuda")
    with pytest.raises(ConfigError, match="did you mean"):
        plan({"sead": [1]})


def test_values_are_laid_over_base_over_defaults():
    made = plan(
        {"optimizer.lr": [0.5, 0.25], "steps": [3], "fault": ["none", "crash@1"]},
        base={"optimizer": {"weight_decay": 0.0}, "fsdp.offload_params": True, "seed": 9},
        workload={"steps": 5, "warmup_steps": 0},
        model="tiny-llama",
    )
    first = made.points[0].spec
    assert first.config["optimizer"]["lr"] == 0.5
    assert first.config["optimizer"]["weight_decay"] == 0.0
    assert first.config["optimizer"]["type"] == "adam"
    assert first.config["fsdp"]["offload_params"] is True
    assert (first.config["seed"], first.config["path"]) == (9, "tiny-llama")
    assert (first.workload.steps, first.workload.warmup_steps) == (3, 0)
    assert [point.spec.fault for point in made.points] == [None, "crash@1"] * 2
    assert made.points[2].spec.config["optimizer"]["lr"] == 0.25, "no point changes another"


def test_real_weights_are_loaded_and_random_ones_are_made():
    made = plan({"model": ["smollm2-135m", "tiny-qwen3"]}, world_size=1)
    real, random = (point.spec for point in made.points)
    assert real.config["init_from_scratch"] is False
    assert random.config["init_from_scratch"] is True
    assert real.config["optimizer"]["lr"] < random.config["optimizer"]["lr"]
    assert real.workload.tokens_per_step < random.workload.tokens_per_step


def test_ids_name_the_work():
    one = plan({"parallel": ["fsdp:d2", "fsdp:d1"]}).points
    two = plan({"backend": ["fsdp:d2t1", ""]})
    assert [point.id for point in two.points] == [one[0].id], "an empty backend is d2 here"
    assert two.num_duplicates == 1
    assert one[0].id != one[1].id
    slower = plan({"parallel": ["fsdp:d2"]}, timeout_seconds=5.0).points
    assert slower[0].id == one[0].id
    assert slower[0].spec.timeout_seconds == 5.0
    assert plan({"parallel": ["fsdp:d2"], "seed": [7]}).points[0].id != one[0].id


def test_merge_keeps_what_it_does_not_name():
    data = {"a": {"b": 1, "c": {"d": 2}}, "e": None}
    merge_at(data, "a", {"c": {"f": 3}})
    merge_at(data, "a.b", 4)
    merge_at(data, "e.g", 5)
    merge_at(data, "h", {"i": 6})
    assert data == {"a": {"b": 4, "c": {"d": 2, "f": 3}}, "e": {"g": 5}, "h": {"i": 6}}


def test_a_text_that_cannot_be_read_makes_its_point_invalid(tmp_path):
    (tmp_path / "good.txt").write_text("a text to learn\n" * 20)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "late.txt").write_bytes(b"a text to learn\n" * 2000 + b"\xff")
    (tmp_path / "folder.txt").mkdir()
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "cut.jsonl").write_text('{"text": "a')
    (tmp_path / "text.csv").write_text("a,b")
    expected = {
        "good.txt": None,
        "missing.txt": "cannot be read: No such file",
        "empty.txt": "holds no text",
        "latin.txt": "must be UTF-8",
        "late.txt": "must be UTF-8",
        "folder.txt": "is not a file",
        "pipe.txt": "is not a file",
        "deep.jsonl": "nested too deeply",
        "cut.jsonl": "is not JSON",
        "text.csv": r"must end in .jsonl or .txt",
    }
    data = [str(tmp_path / name) for name in expected]
    space = SweepSpace(device="cpu", axes={"data": [*data, "", 3, "a\0.txt"], "seed": [1, 2]})
    plan = plan_sweep(space, 0)
    words = [*expected.values(), "names no file", "valid string", "names no file"]
    assert len(plan.points) == 2 * len(words)
    for point, allowed in zip(plan.points, [each for each in words for _ in "12"], strict=True):
        found = " ".join(str(violation) for violation in point.violations)
        assert (allowed or "") in found
        assert (point.spec is None) is (allowed is not None)
    assert plan.num_valid == 2


def test_a_model_whose_files_are_damaged_makes_its_point_invalid(tmp_path):
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    space = SweepSpace(device="cpu", axes={"model": [str(tmp_path), ""], "parallel": ["fsdp:d1"]})
    assert [bool(point.violations) for point in plan_sweep(space, 0).points] == [True, True]


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize(
    ("workload", "axes", "tokens"),
    [
        ({"sequence_lengths": [40, 24]}, {}, 64),
        ({"sequence_lengths": [40, 24], "tokens_per_step": 64}, {}, 64),
        ({}, {"sequence_lengths": [[40, 24]]}, 64),
        ({"sequence_lengths": [40, 24]}, {"sequence_lengths": [[30]]}, 30),
        ({"sequence_lengths": [40, 24]}, {"tokens_per_step": [64]}, 64),
        ({"sequence_lengths": [40, 24]}, {"sequence_lengths": [None], "tokens_per_step": [9]}, 9),
        ({"sequence_lengths": [40, 24]}, {"tokens_per_step": [32]}, None),
        ({"sequence_lengths": [40, 24], "tokens_per_step": 65}, {}, None),
        ({"tokens_per_step": 64}, {"sequence_lengths": [[40, 25]]}, None),
    ],
    ids=str,
)
def test_tokens_of_a_step_follow_from_lengths_or_contradict_them(workload, axes, tokens, num_gpus):
    axes = {"parallel": ["fsdp:d1"], **axes}
    (point,) = plan(axes, num_gpus, workload=workload, model="tiny-llama").points
    if tokens is None:
        assert point.spec is None
        assert "the sum of workload.sequence_lengths" in reasons(point)
    else:
        assert point.spec.workload.tokens_per_step == tokens
        assert point.workload["tokens_per_step"] == tokens, "the record tells what was trained on"


def test_lengths_given_twice_are_the_same_work():
    lengths = {"sequence_lengths": [40, 24]}
    ids = {
        plan({"parallel": ["fsdp:d1"]}, workload=workload).points[0].id
        for workload in (lengths, {**lengths, "tokens_per_step": 64})
    }
    assert len(ids) == 1
