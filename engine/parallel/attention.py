"""Packed attention in transformers models: which kernel serves, and how a layer reaches it.

One function of ours is registered in transformers' public attention registry; layers pass it the
`AttentionContext` of the current forward as a keyword argument, so nothing about a batch or a mesh
lives outside the call, and engines of different meshes share the one registration.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface

from fsdpbench.engine.config.train import ATTENTION_NAMES, HUB_KERNEL
from fsdpbench.engine.parallel.attention_kernels import (
    AttentionKernel,
    PackedLayout,
    cpu_flash,
    eager,
    load_varlen_attn,
    sdpa,
    wrap_flash_package,
)
from fsdpbench.engine.parallel.ulysses import gather_heads, scatter_heads
from fsdpbench.errors import ConfigError, Violation
from fsdpbench.log import get_logger

if TYPE_CHECKING:
    from fsdpbench.engine.batching.containers import PackedMicroBatch

REGISTERED_NAME = "fsdpbench_packed"  # in transformers' registry, and as attn_implementation
CPU_FLASH = AttentionKernel(
    "cpu_flash", cpu_flash, operators=("aten::_scaled_dot_product_flash_attention_for_cpu",)
)
SDPA = AttentionKernel(
    "sdpa",
    sdpa,
    has_dropout=True,
    operators=tuple(
        f"aten::_scaled_dot_product_{kind}"
        for kind in (
            "flash_attention",
            "flash_attention_for_cpu",
            "efficient_attention",
            "cudnn_attention",
        )
    ),
)
EAGER = AttentionKernel("eager", eager, has_dropout=True)
INSTALL_LINES = {
    "flash_attention_3": "build hopper/ of the flash-attention sources, or use flash_attention_2",
    "flash_attention_4": "pip install 'fsdpbench[flash]'",
    "hub kernels": "pip install kernels",
}
logger = get_logger(__name__)


@dataclass(frozen=True)
class AttentionContext:
    """What one forward pass tells its attention layers; passed down as a keyword argument."""

    cu_seqlens: torch.Tensor  # int32 [sequences + 1] over the whole row, on the device
    sequence_lengths: tuple[int, ...]  # the same on the host; padding is a sequence of its own
    cp_group: dist.ProcessGroup
    kernel: AttentionKernel


def build_attention_context(
    microbatch: PackedMicroBatch, cp_group: dist.ProcessGroup, kernel: AttentionKernel
) -> AttentionContext:
    """Describe a packed micro-batch (before it is cut over cp) to the attention layers."""
    return AttentionContext(microbatch.cu_seqlens, microbatch.segment_lengths, cp_group, kernel)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attention_context: AttentionContext,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each sequence of the packed row; transformers' attention signature.

    query [1, H, S, D] with key and value [1, H_kv, S, D] hold this rank's S tokens; the result is
    [1, S, H, D]. Collective over: cp.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [S, H, D]
    context = attention_context
    if context.cp_group.size() > 1:
        q, k, v = scatter_heads(q, k, v, context.cp_group)
    layout = PackedLayout(
        context.cu_seqlens,
        context.sequence_lengths,
        scaling if scaling is not None else q.shape[-1] ** -0.5,
        sliding_window,
        dropout,
    )
    output = context.kernel.run(q, k, v, layout)
    if context.cp_group.size() > 1:
        output = gather_heads(output, context.cp_group)
    return output[None], None


def register_packed_attention() -> str:
    """Make our function known to transformers (again is harmless); return its name there."""
    AttentionInterface.register(REGISTERED_NAME, packed_attention)
    return REGISTERED_NAME


def choose_attention_kernel(
    attn_impl: str, device_type: str, compute_dtype: torch.dtype
) -> AttentionKernel:
    """Find the kernel that an `attn_impl` means on this device. Every answer isolates sequences.

    Raises ConfigError for an unknown name, or for a package that is missing and has no equivalent.
    """
    if attn_impl == "eager":
        return EAGER
    if HUB_KERNEL.fullmatch(attn_impl):
        return _load_hub_kernel(attn_impl)
    if attn_impl not in ATTENTION_NAMES:
        raise _refuse(
            attn_impl, f"must be one of {', '.join(ATTENTION_NAMES)} or a hub kernel org/repo"
        )
    if device_type == "cpu":
        return CPU_FLASH
    if attn_impl == "sdpa" or compute_dtype == torch.float32:  # flash kernels take half precision
        return SDPA
    if attn_impl == "flash_attention_4" or (attn_impl == "auto" and _prefers_flash_4(device_type)):
        return _load_flash_4()
    if attn_impl == "flash_attention_3":
        return _load_flash_3()
    if device_type == "cuda" and importlib.util.find_spec("flash_attn_2_cuda"):
        from flash_attn import flash_attn_varlen_func

        return wrap_flash_package("flash_attn", flash_attn_varlen_func)
    return load_varlen_attn()


def check_attention_dropout(kernel: AttentionKernel, dropout: float) -> None:
    """Refuse attention dropout that the kernel would silently leave out."""
    if dropout and not kernel.has_dropout:
        raise ConfigError(
            [
                Violation(
                    "attn_impl",
                    kernel.name,
                    f"has no dropout, and the model asks for attention_dropout={dropout}",
                    "set disable_dropout to true, or attn_impl to sdpa on a GPU or eager",
                )
            ]
        )


def _prefers_flash_4(device_type: str) -> bool:
    """Flash-attn 4 is the fastest on Hopper and later, where it is installed."""
    if device_type != "cuda" or not _has_flash_4():
        return False
    capability: tuple[int, int] = torch.get_device_module(device_type).get_device_capability()
    return capability >= (9, 0)


def _has_flash_4() -> bool:
    found = importlib.util.find_spec("flash_attn") is not None
    return found and importlib.util.find_spec("flash_attn.cute") is not None


def _load_flash_4() -> AttentionKernel:
    if not _has_flash_4():
        raise _refuse("flash_attention_4", "is not installed", INSTALL_LINES["flash_attention_4"])
    from flash_attn.cute import flash_attn_varlen_func

    return wrap_flash_package("flash_attn_4", flash_attn_varlen_func)


def _load_flash_3() -> AttentionKernel:
    if importlib.util.find_spec("flash_attn_interface") is None:
        raise _refuse("flash_attention_3", "is not installed", INSTALL_LINES["flash_attention_3"])
    from flash_attn_interface import flash_attn_varlen_func

    return wrap_flash_package("flash_attn_3", flash_attn_varlen_func)


def _load_hub_kernel(attn_impl: str) -> AttentionKernel:
    """Fetch a kernel of the Hugging Face hub; it must offer flash-attn's packed signature."""
    if importlib.util.find_spec("kernels") is None:
        raise _refuse(attn_impl, "needs the package `kernels`", INSTALL_LINES["hub kernels"])
    from kernels import get_kernel

    parts = HUB_KERNEL.fullmatch(attn_impl)
    assert parts is not None  # the caller matched it
    loaded = get_kernel(parts["repo"], revision=parts["revision"] or "main")
    function = getattr(loaded, parts["function"] or "flash_attn_varlen_func", None)
    if function is None:
        raise _refuse(attn_impl, "has no flash_attn_varlen_func", "name another function")
    return wrap_flash_package(attn_impl, function)


def _refuse(attn_impl: str, problem: str, remedy: str = "") -> ConfigError:
    return ConfigError([Violation("attn_impl", repr(attn_impl), problem, remedy)])
