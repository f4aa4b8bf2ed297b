"""Which kernel a configuration gets, what is refused, and how layers reach it."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface

from fsdpbench.engine.batching.packing import pack
from fsdpbench.engine.parallel import attention
from fsdpbench.engine.parallel.attention import (
    CPU_FLASH,
    EAGER,
    SDPA,
    build_attention_context,
    check_attention_dropout,
    choose_attention_kernel,
    packed_attention,
    register_packed_attention,
)
from fsdpbench.errors import ConfigError


@pytest.mark.parametrize(
    ("attn_impl", "device_type", "dtype", "kernel"),
    [
        ("flash_attention_2", "cpu", torch.float32, "cpu_flash"),
        ("flash_attention_2", "cpu", torch.bfloat16, "cpu_flash"),
        ("sdpa", "cpu", torch.float32, "cpu_flash"),
        ("auto", "cpu", torch.bfloat16, "cpu_flash"),
        ("eager", "cpu", torch.float32, "eager"),
        ("eager", "cuda", torch.bfloat16, "eager"),
        ("sdpa", "cuda", torch.bfloat16, "sdpa"),
        ("flash_attention_2", "cuda", torch.float32, "sdpa"),
        ("flash_attention_2", "simgpu", torch.bfloat16, "varlen_attn"),
        ("auto", "simgpu", torch.bfloat16, "varlen_attn"),
    ],
)
def test_choice(attn_impl, device_type, dtype, kernel):
    assert choose_attention_kernel(attn_impl, device_type, dtype).name == kernel


def test_names_that_mean_nothing_are_refused_with_the_list():
    with pytest.raises(ConfigError, match=r"attn_impl='flash'.*flash_attention_2.*eager.*hub"):
        choose_attention_kernel("flash", "cpu", torch.float32)


@pytest.mark.parametrize(
    ("attn_impl", "installs", "module"),
    [
        ("flash_attention_4", "fsdpbench.flash", "flash_attn"),
        ("flash_attention_3", "hopper", "flash_attn_interface"),
        ("kernels-community/flash-attn@main:varlen", "pip install kernels", "kernels"),
    ],
)
def test_a_missing_package_is_named_with_its_install_line(attn_impl, installs, module):
    if attention.importlib.util.find_spec(module):
        pytest.skip(f"{module} is installed")
    with pytest.raises(ConfigError, match=installs):
        choose_attention_kernel(attn_impl, "cuda", torch.bfloat16)


def test_dropout_that_a_kernel_lacks_is_refused():
    check_attention_dropout(CPU_FLASH, 0.0)
    check_attention_dropout(EAGER, 0.1)
    check_attention_dropout(SDPA, 0.1)
    with pytest.raises(ConfigError, match=r"attention_dropout=0.1.*disable_dropout"):
        check_attention_dropout(CPU_FLASH, 0.1)


def test_registration_is_idempotent_and_under_our_own_name():
    name = register_packed_attention()
    assert register_packed_attention() == name
    assert AttentionInterface()[name] is packed_attention
    assert name not in ("sdpa", "eager", "flash_attention_2")


def test_context_counts_padding_as_a_sequence_of_its_own():
    batch = {
        "input_ids": torch.ones(2, 4, dtype=torch.long),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool(),
    }
    context = build_attention_context(pack(batch, [0, 1], pad_multiple=8), None, CPU_FLASH)
    assert context.sequence_lengths == (3, 2, 3)
    assert context.cu_seqlens.tolist() == [0, 3, 5, 8]


def test_a_model_called_without_a_context_says_what_is_missing():
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(TypeError, match="attention_context"):
        packed_attention(torch.nn.Identity(), x, x, x, None)
