from dataclasses import replace

import pytest

from fsdpbench.bench.flops import (
    PEAK_FLOPS_PER_SECOND,
    count_linear_weights,
    count_step_flops,
    describe_mfu,
    find_peak_flops,
)
from fsdpbench.engine.models.facts import read_model_facts


@pytest.mark.parametrize(
    ("preset", "gigaflops"), [("qwen3-0.6b", 4.98), ("qwen3-1.7b", 11.7), ("qwen3-4b", 27.8)]
)
def test_published_figures_of_four_sequences_of_4096(preset, gigaflops):
    per_token = count_step_flops(read_model_facts(preset), [4096] * 4) / 16384
    assert per_token / 1e9 == pytest.approx(gigaflops, rel=5e-3)


def test_linear_weights_are_all_parameters_but_norms_and_tables():
    facts = read_model_facts("qwen3-0.6b")
    norms = facts.num_layers * (2 * facts.hidden_size + 2 * facts.head_dim) + facts.hidden_size
    table = facts.vocab_size * facts.hidden_size
    assert count_linear_weights(facts) == facts.num_parameters - norms - table


def test_frozen_weights_cost_no_gradient():
    facts = read_model_facts("tiny-qwen3")
    whole, adapted = (count_step_flops(facts, [64], adapters) for adapters in (0, 1000))
    weights = count_linear_weights(facts) + facts.hidden_size * facts.vocab_size
    assert whole - adapted == 64 * (2 * weights - 6 * 1000)


def count_by_hand(facts, lengths):
    """Walk over every token and every layer."""
    total = 0
    for length in lengths:
        for position in range(length):
            total += 6 * count_linear_weights(facts) + 6 * facts.hidden_size * facts.vocab_size
            for window in facts.layer_windows:
                seen = position + 0.5 if window is None else min(position + 0.5, window)
                total += 6 * facts.num_attention_heads * facts.head_dim * 2 * seen
    return total


@pytest.mark.parametrize("lengths", [[1], [7], [64, 3, 17], [6144 // 64, 12, 2]], ids=str)
@pytest.mark.parametrize("windows", [(None,) * 4, (8, 8, 8, None), (8, 16, None, None)], ids=str)
def test_equals_a_walk_over_tokens(lengths, windows):
    facts = replace(read_model_facts("tiny-qwen3"), layer_windows=windows)
    # a window counts whole tokens, so the walk differs by half a token at the window's edge
    assert count_step_flops(facts, lengths) == pytest.approx(
        count_by_hand(facts, lengths), rel=1e-4
    )


def test_mixed_lengths_cost_what_their_squares_say():
    facts = read_model_facts("qwen3-1.7b")
    mixed = [6144, 3584, 2560, 1792, 1024, 768, 384, 128]
    difference = count_step_flops(facts, mixed) - count_step_flops(facts, [4096] * 4)
    squares = sum(n * n for n in mixed) - 4 * 4096**2
    assert difference == 6 * 28 * 16 * 128 * squares


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce GTX 1080", None),
        ("Tesla V100-SXM2-16GB", None),
        ("", None),
        (None, None),
    ],
)
def test_peak_by_name(name, peak):
    assert find_peak_flops(name) == peak


def test_every_row_can_be_reached():
    for pattern, peak in PEAK_FLOPS_PER_SECOND:
        assert find_peak_flops(f"NVIDIA {pattern} 80GB") == peak


def test_mfu_of_a_known_gpu():
    peak, formula = describe_mfu("NVIDIA H200", "bfloat16", 2)
    assert peak == 2 * 989e12
    assert "2 x 989e12 FLOP/s" in formula
    assert "NVIDIA H200" in formula


@pytest.mark.parametrize(
    ("gpu", "dtype", "reason"),
    [
        (None, "bfloat16", "no GPU"),
        ("Mystery 1", "bfloat16", "Mystery 1 is not in the table"),
        ("NVIDIA H200", "float32", "dtype is float32"),
    ],
)
def test_no_mfu_says_why(gpu, dtype, reason):
    peak, formula = describe_mfu(gpu, dtype, 1)
    assert peak is None
    assert reason in formula
