"""The per-layer step equals AdamW bit for bit; its states are checkpoints' states."""

from __future__ import annotations

import copy

import pytest
import torch

from fsdpbench.engine.config.optimizer import OptimizerConfig
from fsdpbench.engine.device import Device
from fsdpbench.engine.optim.adamw import AdamW
from fsdpbench.engine.optim.build import build_optimizer
from fsdpbench.engine.optim.clip import gradient_norm, plan_clipping
from fsdpbench.engine.optim.streaming import PerLayerOptimWrapper, StreamedAdamW
from fsdpbench.errors import CheckpointError, ConfigError
from tests.distributed.pool import run_on_ranks

PAYLOADS = "tests.distributed.payloads.optim_streaming"
CPU = Device("cpu")
SHAPES = [(37, 129), (129,), (0, 4), (), (3000,), (5, 5), (700,)]
SETTINGS = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def make_pair(dtype=torch.float32, device="cpu", **settings):
    """Build parameters under AdamW and the same under the per-layer step, two units and a rest."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]
    plain, streamed = ([torch.nn.Parameter(v.clone()) for v in values] for _ in range(2))
    settings = {"device": CPU, **SETTINGS, **settings}
    blocks = [[streamed[1], streamed[2]], [streamed[5], streamed[6]]]
    return (plain, AdamW(plain, **SETTINGS)), (
        streamed,
        StreamedAdamW(streamed, blocks=blocks, **settings),
    )


def run_step(params, optimizer, seed, *, without=(), poison=False, max_norm=0.5):
    generator = torch.Generator().manual_seed(seed)
    for index, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator).to(param)
        param.grad = None if index in without else grad
    if poison:
        params[0].grad[3, 7] = torch.nan
    optimizer.step(clip=plan_clipping(gradient_norm(params), max_norm))


def check_equal(plain, streamed):
    (params, optimizer), (others, other) = plain, streamed
    for a, b in zip(params, others, strict=True):
        assert torch.equal(a, b)
        assert optimizer.state.get(a, {}).keys() == other.state.get(b, {}).keys()
        for name, value in optimizer.state.get(a, {}).items():
            assert torch.equal(value.cpu(), other.state[b][name]), name
            assert other.state[b][name].device.type == "cpu"


@pytest.mark.parametrize("stage_weights", [None, True], ids=["weights_there", "weights_travel"])
@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_adamw_bit_for_bit(dtype, prefetch, stage_weights):
    plain, streamed = make_pair(dtype, prefetch_layers=prefetch, stage_weights=stage_weights)
    for seed in range(6):
        for pair in (plain, streamed):
            lacking = {0: (6, 3), 2: (1, 2), 3: (0,)}.get(seed, ())
            run_step(*pair, seed, without=lacking, poison=seed == 4)
        check_equal(plain, streamed)
    assert streamed[1].state[streamed[0][6]]["step"].item() == 4.0


def test_a_skipped_step_changes_no_bit():
    _, (params, optimizer) = make_pair(stage_weights=True)
    run_step(params, optimizer, 0)
    before = copy.deepcopy([params, [optimizer.state[p] for p in params]])
    run_step(params, optimizer, 1, poison=True)
    for old, param, state in zip(before[0], params, before[1], strict=True):
        assert torch.equal(old, param)
        assert all(torch.equal(optimizer.state[param][name], state[name]) for name in state)


def test_states_move_between_adamw_and_the_per_layer_step():
    plain, streamed = make_pair()
    for seed in range(2):
        run_step(*plain, seed, without=(3,))
    run_step(*streamed, 7)  # states that the load must replace or forget
    with torch.no_grad():
        for a, b in zip(plain[0], streamed[0], strict=True):
            b.copy_(a)
    streamed[1].load_state_dict(plain[1].state_dict())
    check_equal(plain, streamed)
    for seed in range(2, 4):
        for pair in (plain, streamed):
            run_step(*pair, seed)
        check_equal(plain, streamed)
    plain[1].load_state_dict(streamed[1].state_dict())
    streamed[1].load_state_dict(streamed[1].state_dict())  # its own memory
    for pair in (plain, streamed):
        run_step(*pair, 5)
    check_equal(plain, streamed)


def test_a_state_of_another_shard_is_refused():
    plain, streamed = make_pair()
    run_step(*plain, 0)
    saved = plain[1].state_dict()
    saved["state"][4]["exp_avg"] = torch.zeros(10)
    with pytest.raises(CheckpointError, match=r"exp_avg of parameter 4: found \(10,\)"):
        streamed[1].load_state_dict(saved)
    del saved["state"][4]["exp_avg"]
    with pytest.raises(CheckpointError, match="exp_avg of parameter 4: found missing"):
        streamed[1].load_state_dict(saved)


def test_made_states_are_zero_and_take_no_step():
    _, (params, optimizer) = make_pair()
    run_step(params, optimizer, 0)
    optimizer.state.clear()
    optimizer.make_states()
    assert all(not value.any() for p in params for value in optimizer.state[p].values())


def test_groups_of_different_settings_are_refused():
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    groups = [{"params": [first], "lr": 0.1}, {"params": [second], "weight_decay": 0.5}]
    with pytest.raises(ConfigError) as caught:
        StreamedAdamW(groups, device=CPU)
    assert "param_groups.lr=0.1, 0.001: must be equal in all groups" in str(caught.value)
    assert "param_groups.weight_decay=0.01, 0.5" in str(caught.value)
    optimizer = StreamedAdamW([{"params": [first]}, {"params": [second]}], device=CPU)
    first.grad = torch.ones(2)
    optimizer.step()
    optimizer.param_groups[1]["betas"] = (0.5, 0.5)
    with pytest.raises(ConfigError, match=r"param_groups\.betas"):
        optimizer.step()


def test_a_late_group_is_refused():
    optimizer = StreamedAdamW([torch.nn.Parameter(torch.ones(2))], device=CPU)
    with pytest.raises(ConfigError, match="add_param_group"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


def test_is_built_from_the_configuration_when_blocks_are_given():
    param = torch.nn.Parameter(torch.ones(3))
    config = OptimizerConfig(lr=0.5, beta1=0.5, eps=0.25)
    optimizer = build_optimizer(
        [("w", param)], config, blocks=[[param]], device=CPU, prefetch_layers=3
    )
    assert type(optimizer) is PerLayerOptimWrapper
    assert optimizer.prefetch_layers == 3
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.999)
    with pytest.raises(ConfigError, match=r"optimizer.type=sgd: .* adam only"):
        build_optimizer([("w", param)], OptimizerConfig(type="sgd"), blocks=[], device=CPU)


@pytest.mark.parametrize("layout", ["fsdp", "fsdp_tp"])
def test_sharded_steps_and_checkpoints_equal_adamws(layout, tmp_path):
    results = run_on_ranks(
        f"{PAYLOADS}:stream_and_resume", 2, timeout_seconds=60, layout=layout, folder=str(tmp_path)
    )
    for seen in results:
        assert seen["blocks"] == [2, 1]
        assert seen["dtensors_on_the_cpu"]
        assert seen["same_steps"]
        assert seen["same_after_resume"]
        assert seen["adamw_reads_it"]


@pytest.mark.gpu
@pytest.mark.parametrize("on", ["cuda", "cpu"], ids=["weights_there", "weights_travel"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_equals_adamw_on_a_gpu(prefetch, on):
    gpu = Device("cuda", 0)
    plain, _ = make_pair(device="cuda")
    _, streamed = make_pair(device=on, prefetch_layers=prefetch)
    params = streamed[0]
    blocks = [params[1:3], params[5:7]]
    streamed = (
        params,
        StreamedAdamW(params, **SETTINGS, device=gpu, blocks=blocks, prefetch_layers=prefetch),
    )
    for seed in range(4):
        run_step(*plain, seed, poison=seed == 2, max_norm=None)
        run_step(*streamed, seed, poison=seed == 2, max_norm=None)
        for a, b in zip(plain[0], streamed[0], strict=True):
            assert torch.equal(a.cpu(), b.cpu())
            for name, value in plain[1].state[a].items():
                assert torch.equal(value.cpu(), streamed[1].state[b][name])
                assert streamed[1].state[b][name].device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("on", ["cuda", "cpu"], ids=["weights_there", "weights_travel"])
def test_device_memory_stays_under_three_blocks(on):
    gpu, elements = Device("cuda", 0), 1 << 20
    params = [torch.nn.Parameter(torch.ones(elements, device=on)) for _ in range(16)]
    blocks = [params[start : start + 2] for start in range(0, 16, 2)]
    optimizer = StreamedAdamW(params, device=gpu, blocks=blocks, prefetch_layers=1)
    for param in params:
        param.grad = torch.ones_like(param)
    for _ in range(2):
        torch.cuda.synchronize()
        resting = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        assert torch.cuda.max_memory_allocated() - resting < 3 * 16 * 2 * elements
        assert torch.cuda.memory_allocated() == resting
    assert optimizer.state[params[0]]["exp_avg"].is_pinned()
