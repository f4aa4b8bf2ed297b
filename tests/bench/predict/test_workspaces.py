import pytest
import torch

from fsdpbench.bench.predict.workspaces import plan_workspaces, round_up


@pytest.mark.parametrize(("number", "expected"), [(0, 0), (1, 32), (32, 32), (33, 64)])
def test_round_up(number, expected):
    assert round_up(number, 32) == expected


def test_packed_attention_backward():
    query = torch.empty(1000, 8, 80, dtype=torch.bfloat16, device="meta")
    key = query[:, :2]
    bounds = torch.empty(4, dtype=torch.int32, device="meta")  # three sequences
    arguments = [query, query, key, key, query, None, bounds]
    rows = 1000 + 3 * 128
    assert plan_workspaces("torch_attn::_varlen_attn_backward", arguments) == [
        4 * 8 * rows,
        4 * rows * 8 * 96,
        2 * 1000 * 8 * 80,
        2 * 1000 * 8 * 80,
    ]
    equal_heads = [query, query, query, query, query, None, bounds]
    assert len(plan_workspaces("torch_attn::_varlen_attn_backward", equal_heads)) == 2


def test_embedding_backward_sorts_many_tokens_only():
    for tokens, number in ((3072, 0), (3073, 5)):
        gradient = torch.empty(tokens, 16, device="meta")
        indices = torch.empty(tokens, dtype=torch.int64, device="meta")
        sizes = plan_workspaces("aten::embedding_dense_backward", [gradient, indices])
        assert len(sizes) == number


def test_other_operators_take_none():
    assert plan_workspaces("aten::add", []) == []
