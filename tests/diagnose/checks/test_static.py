import pytest

from fsdpbench.diagnose.checks.machine import Machine
from fsdpbench.diagnose.checks.static import (
    ResidentBytes,
    UnreadableConfigError,
    check_config,
    count_resident_bytes,
)
from fsdpbench.diagnose.findings import Severity
from fsdpbench.engine.config.train import TrainEngineConfig
from fsdpbench.engine.models.facts import read_model_facts

GIB = 1 << 30
LAPTOP = Machine(num_gpus=0, num_cores=4, memory_bytes=16 * GIB)
NODE = Machine(8, 64, 1024 * GIB, gpu_bytes=80 * GIB, gpu_name="H100")


def check(tmp_path, text, world_size=None, machine=LAPTOP):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return check_config(path, world_size, machine)


def problems(report):
    return [item for item in report.findings if item.severity is Severity.PROBLEM]


GOOD = 'path: tiny-qwen3\nbackend: "fsdp:d2t2"\noptimizer: {type: adam}\n'


@pytest.mark.parametrize(
    ("text", "world_size", "code"),
    [
        (GOOD, None, 0),
        (GOOD, 4, 0),
        (GOOD, 8, 4),
        ("path: tiny-llama\n", 2, 0),
        ('path: tiny-qwen3\nbackend: "fsdp:t3"\n', 3, 4),
        ('path: tiny-qwen3\nbackend: "fsdp:c16"\n', 16, 4),
        ('path: smollm2-135m\nbackend: "fsdp:t2"\n', 2, 4),
        ('path: smollm2-135m\nbackend: "fsdp:t3"\n', 3, 0),
        ("path: no/such-model\n", 1, 4),
        ("nonsense: 1\n", 1, 4),
        ("kind: sft\n", 1, 4),
        ("kind: sweep\naxes: {tp: [1, 2]}\nworld_size: 2\n", None, 0),
        ("kind: sweep\naxes: {tp: [3]}\nworld_size: 2\n", None, 4),
        ("kind: sweep\nnonsense: 1\n", None, 4),
    ],
)
def test_verdict_of_a_config(tmp_path, text, world_size, code):
    assert check(tmp_path, text, world_size).exit_code == code


def test_all_violations_come_at_once(tmp_path):
    text = (
        'path: tiny-qwen3\nbackend: "fsdp:d1c3t4"\noptimizer: {type: adam}\nis_critic: true\n'
        "fsdp: {wrap_policy: {transformer_layer_cls_to_wrap: [Foo]}}\nnonsense: 1\n"
    )
    places = {item.where for item in problems(check(tmp_path, text, 8))}
    assert places >= {
        "backend",
        "is_critic",
        "tensor_parallel_size",
        "fsdp.wrap_policy.transformer_layer_cls_to_wrap",
        "nonsense",
    }


def test_numbers_of_a_wrong_product_are_named(tmp_path):
    (problem,) = problems(check(tmp_path, GOOD, 8))
    for number in ("2", "4", "8"):
        assert number in problem.allowed
    assert problem.remedy


def test_a_run_is_checked_engine_by_engine(tmp_path):
    data = tmp_path / "data.jsonl"
    data.touch()
    text = (
        "kind: sft\n"
        'actor: {path: tiny-llama, backend: "fsdp:t3", optimizer: {type: adam}}\n'
        "dataset: {path: data.jsonl}\n"
    )
    found = problems(check(tmp_path, text, 3))
    assert {item.where for item in found} == {"actor.tensor_parallel_size"}
    missing = problems(check(tmp_path, text.replace("data.jsonl", "none.jsonl"), 3))
    assert "dataset.path" in {item.where for item in missing}


@pytest.mark.parametrize("text", ["a: [1\n", "- 1\n", "a: 1\na: 2\n"])
def test_what_is_no_yaml_mapping_cannot_be_checked(tmp_path, text):
    with pytest.raises(UnreadableConfigError):
        check(tmp_path, text)
    with pytest.raises(UnreadableConfigError):
        check_config(tmp_path / "missing.yaml", None, LAPTOP)


@pytest.mark.parametrize(
    ("text", "machine", "where"),
    [
        ('path: llama3-70b\nbackend: "fsdp:d2"\noptimizer: {type: adam}\n', LAPTOP, "path"),
        ('path: llama3-70b\nbackend: "fsdp:d8"\noptimizer: {type: adam}\n', NODE, "path"),
        (
            'path: llama3-70b\nbackend: "fsdp:d8"\noptimizer: {type: adam}\n'
            "fsdp: {offload_params: true}\n",
            NODE,
            "fsdp.offload_params",
        ),
        ('path: qwen3-8b\nbackend: "fsdp:d8"\noptimizer: {type: adam}\n', NODE, None),
        ('path: tiny-qwen3\nbackend: "fsdp:d16"\n', NODE, "world_size"),
    ],
)
def test_what_cannot_fit_this_machine(tmp_path, text, machine, where):
    found = [item.where for item in problems(check(tmp_path, text, None, machine))]
    assert found == ([where] if where else [])


def test_another_cluster_is_not_held_against_this_machine(tmp_path):
    text = 'path: llama3-70b\nbackend: "fsdp:d64"\noptimizer: {type: adam}\n'
    assert check(tmp_path, text, 64, LAPTOP).exit_code == 0


ADAM, OFFLOAD = {"optimizer": {"type": "adam"}}, {"offload_params": True}
STREAMED = {"per_layer_optim_step": True}


@pytest.mark.parametrize(
    ("fields", "on_devices", "on_hosts"),
    [
        (ADAM, 16, 0),
        ({"optimizer": {"type": "sgd"}}, 8, 0),
        ({"optimizer": {"type": "adam_bf16"}, "optimizer_dtype": "bfloat16"}, 10, 0),
        ({}, 4, 0),
        ({**ADAM, "fsdp": OFFLOAD}, 0, 16),
        ({**ADAM, "fsdp": STREAMED}, 8, 8),
        ({**ADAM, "fsdp": {**OFFLOAD, **STREAMED}}, 0, 16),
    ],
)
def test_bytes_of_a_parameter(fields, on_devices, on_hosts):
    model = read_model_facts("tiny-qwen3")
    config = TrainEngineConfig.model_validate({"path": "tiny-qwen3", **fields})
    number = model.num_parameters
    assert count_resident_bytes(config, model) == ResidentBytes(
        on_devices * number, on_hosts * number
    )


def test_frozen_weights_have_neither_gradients_nor_states():
    model = read_model_facts("tiny-qwen3")
    fields = {"path": "tiny-qwen3", "use_lora": True, "lora_rank": 2, **ADAM}
    config = TrainEngineConfig.model_validate(fields)
    adapters = 2 * model.num_layers * sum(map(sum, model.linear_shapes.values()))
    resident = count_resident_bytes(config, model)
    assert resident == ResidentBytes(2 * model.num_parameters + 16 * adapters, 0)


def test_unused_fields_are_notes(tmp_path):
    report = check(tmp_path, GOOD + "lora_rank: 8\n", 4)
    assert report.exit_code == 0
    assert [item.severity for item in report.findings] == [Severity.NOTE]
