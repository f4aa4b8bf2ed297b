"""The AnyPrecisionAdamW update of a shard as one Triton kernel: one pass over memory.

Same arithmetic as `anyprecision`'s chunks, which remain the rule where there is no Triton. Import
this module only on a machine that has it: the one import of triton in the package is here.
"""

# Triton evaluates the annotations of a kernel and knows only its own:
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK_ELEMENTS = 2048


@triton.jit(do_not_specialize=["index"])
def _update_kernel(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    compensation_ptr,
    sizes_ptr,
    floors_ptr,
    grad_scale_ptr,
    found_inf_ptr,
    index,  # of the shard among sizes and floors
    numel,
    decay,
    weight1,
    beta2,
    weight2,
    HAS_SCALE: tl.constexpr,
    HAS_VERDICT: tl.constexpr,
    KAHAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if HAS_VERDICT:  # a skipped step loads and stores nothing
        numel = tl.where(tl.load(found_inf_ptr) == 0.0, numel, 0)
    mask = at < numel
    param = tl.load(param_ptr + at, mask=mask, other=0.0)
    grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_SCALE:
        grad = grad / tl.load(grad_scale_ptr)
    exp_avg = tl.load(exp_avg_ptr + at, mask=mask, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + at, mask=mask, other=0.0)
    moment1 = exp_avg.to(tl.float32) + weight1 * (grad - exp_avg.to(tl.float32))
    moment2 = exp_avg_sq.to(tl.float32) * beta2 + weight2 * grad * grad
    wide = param.to(tl.float32)
    root = tl.sqrt(moment2) + tl.load(floors_ptr + index)
    update = tl.load(sizes_ptr + index) * moment1 / root - decay * wide
    tl.store(exp_avg_ptr + at, moment1.to(exp_avg.dtype), mask=mask)
    tl.store(exp_avg_sq_ptr + at, moment2.to(exp_avg_sq.dtype), mask=mask)
    if KAHAN:
        carried = tl.load(compensation_ptr + at, mask=mask, other=0.0)
        update += carried.to(tl.float32)
        rounded = (wide + update).to(param.dtype)
        lost = update - (rounded.to(tl.float32) - wide)
        tl.store(compensation_ptr + at, lost.to(carried.dtype), mask=mask)
        tl.store(param_ptr + at, rounded, mask=mask)
    else:
        tl.store(param_ptr + at, (wide + update).to(param.dtype), mask=mask)


def update_shard(
    shard: dict[str, torch.Tensor],
    index: int,
    sizes: torch.Tensor,
    floors: torch.Tensor,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    group: dict[str, Any],
) -> None:
    """Update one shard in place; `shard` holds flat param, grad, moments and maybe compensation.

    `sizes` and `floors` are float32 [shards], read at `index`. On the current device and stream.
    """
    param = shard["param"]
    beta1, beta2 = group["betas"]
    if param.numel() == 0:
        return
    _update_kernel[(triton.cdiv(param.numel(), BLOCK_ELEMENTS),)](
        param,
        shard["grad"],
        shard["exp_avg"],
        shard["exp_avg_sq"],
        shard.get("compensation", param),
        sizes,
        floors,
        sizes if grad_scale is None else grad_scale,
        sizes if found_inf is None else found_inf,
        index,
        param.numel(),
        group["lr"] * group["weight_decay"],
        1 - beta1,
        beta2,
        1 - beta2,
        HAS_SCALE=grad_scale is not None,
        HAS_VERDICT=found_inf is not None,
        KAHAN="compensation" in shard,
        BLOCK=BLOCK_ELEMENTS,
    )
