"""How much arithmetic a step is, and what part of the GPU's peak it reaches. Pure arithmetic.

FLOPs of a step = tokens x (6 N_linear + 6 hidden vocab)
                + 6 heads head_dim x sum over layers and sequences of context(length)
where N_linear are the weights of the layers' linear maps and context(length) is twice the number of
(query, key) pairs that a causal layer looks at: length^2, or 2 window length - window^2 when the
layer's window is shorter than the sequence. Forward and backward; recomputation is not counted.
Frozen weights (LoRA) cost 4 instead of 6, since they get no gradient, and adapters 6 a weight.
"""

from __future__ import annotations

from collections.abc import Iterable

from fsdpbench.engine.models.facts import ModelFacts

STEP_FORMULA = (
    "6 N_linear + 6 hidden vocab + 6 layers heads head_dim mean_context FLOP per token "
    "(causal half, real sequence lengths, recompute not counted; weights that LoRA freezes 4)"
)

# Dense peak in FLOP/s of bf16 (and fp16) matrix products with fp32 accumulation, from the vendors'
# data sheets. The first row whose words all occur in the device's name counts.
PEAK_FLOPS_PER_SECOND: tuple[tuple[str, float], ...] = (
    ("GB300", 2500e12),
    ("B300", 2250e12),
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("B100", 1750e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIE", 756e12),
    ("H100", 989e12),
    ("H800 PCIE", 756e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A30", 165e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("A40", 149.7e12),
    ("RTX A6000", 154.8e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 4090", 165.2e12),
    ("MI325X", 1307e12),
    ("MI300X", 1307e12),
)


def count_linear_weights(facts: ModelFacts) -> int:
    """Count the weights of the layers' linear maps, embedding and head not included."""
    return facts.num_layers * sum(rows * columns for rows, columns in facts.linear_shapes.values())


def count_context(length: int, window: int | None) -> int:
    """Return twice the (query, key) pairs of one sequence in one layer, the diagonal halved."""
    if window is None or window >= length:
        return length * length
    return 2 * window * length - window * window


def count_step_flops(
    facts: ModelFacts, sequence_lengths: Iterable[int], num_adapter_weights: int = 0
) -> int:
    """Count the FLOPs of one training step over all sequences of all ranks.

    With `num_adapter_weights` these alone are trained.
    """
    lengths = tuple(sequence_lengths)
    weights = count_linear_weights(facts) + facts.hidden_size * facts.vocab_size
    per_token = (4 if num_adapter_weights else 6) * weights + 6 * num_adapter_weights
    context = sum(
        facts.layer_windows.count(window) * sum(count_context(length, window) for length in lengths)
        for window in set(facts.layer_windows)
    )
    return sum(lengths) * per_token + 6 * facts.num_attention_heads * facts.head_dim * context


def find_peak_flops(gpu_name: str | None) -> float | None:
    """Return the dense bf16 peak of one GPU in FLOP/s, or None for a GPU that the table lacks."""
    if gpu_name is None:
        return None
    words = gpu_name.upper().replace("-", " ").split()
    for pattern, peak in PEAK_FLOPS_PER_SECOND:
        if all(word in words for word in pattern.split()):
            return peak
    return None


def describe_mfu(gpu_name: str | None, dtype: str, num_gpus: int) -> tuple[float | None, str]:
    """Return the peak FLOP/s of all GPUs together, and the formula of MFU or why there is none."""
    peak = find_peak_flops(gpu_name)
    if gpu_name is None:
        return None, "null: no GPU"
    if peak is None:
        return None, f"null: the peak of {gpu_name} is not in the table"
    if dtype not in ("bfloat16", "float16"):
        return None, f"null: the table holds 16-bit peaks and dtype is {dtype}"
    formula = (
        f"tokens_per_second x ({STEP_FORMULA}) / ({num_gpus} x {peak / 1e12:g}e12 FLOP/s, "
        f"dense {dtype} peak of {gpu_name})"
    )
    return peak * num_gpus, formula
