"""Owns the tests of attention over ragged rows: masks and the two ways to compute the same.
Refuses models; tests of the cache run whole ones.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from distill.runtime import attention
from distill.runtime.attention import (
    needs_no_mask,
    products_attention,
    ragged_attention,
    ragged_mask,
)


def mask_for(positions, length, **changes):
    settings = {"window": None, "group": 1}
    return ragged_mask(torch.tensor(positions), length, dtype=torch.float32, **(settings | changes))


def test_a_query_sees_its_row_up_to_itself():
    mask = mask_for([[2, 3], [0, 1]], 4)
    assert mask.shape == (2, 1, 2, 4)
    assert (mask[:, 0] == 0).tolist() == [
        [[True, True, True, False], [True, True, True, True]],
        [[True, False, False, False], [True, True, False, False]],
    ]


def test_a_window_hides_what_is_too_far_back():
    mask = mask_for([[5]], 6, window=3)
    assert (mask[0, 0, 0] == 0).tolist() == [False, False, False, True, True, True]


def test_the_mask_repeats_for_every_query_head_of_a_group():
    mask = mask_for([[2, 3]], 4, group=3)
    assert mask.shape == (1, 1, 6, 4)
    assert torch.equal(mask[0, 0, :2], mask[0, 0, 2:4])
    assert torch.equal(mask[0, 0, :2], mask[0, 0, 4:])


def test_a_mask_is_left_out_only_where_none_is_needed():
    assert needs_no_mask(0, 2, 2, window=None)  # a fresh prompt
    assert needs_no_mask(4, 1, 5, window=None)  # one token of equally long rows
    assert not needs_no_mask(None, 1, 5, window=None)
    assert not needs_no_mask(4, 2, 6, window=None)
    assert not needs_no_mask(4, 1, 5, window=3)
    assert needs_no_mask(4, 1, 5, window=5)


def tensors(batch, num_queries, length, dtype, heads=2, group=2):
    generator = torch.Generator().manual_seed(batch + num_queries)
    memory = torch.randn(2, batch + 3, heads, length + 9, 8, generator=generator).to(dtype)
    key, value = memory[:, 1 : 1 + batch, :, :length]  # as the cache hands them out
    query = torch.randn(batch, heads * group, num_queries, 8, generator=generator).to(dtype)
    return query, key, value


def reference(query, key, value, mask, group, scale):
    """Repeat the key/value heads, compute in float64."""
    key, value = (t.repeat_interleave(group, dim=1).double() for t in (key, value))
    return F.scaled_dot_product_attention(
        query.double(), key, value, attn_mask=mask, scale=scale
    ).transpose(1, 2)


@pytest.mark.parametrize("batch", [1, 20])  # one path each in bfloat16
@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_grouped_attention_equals_repeated_heads(batch, num_queries, dtype, atol, scale):
    length = 13
    query, key, value = tensors(batch, num_queries, length, dtype)
    starts = torch.arange(batch).unsqueeze(1) % (length - num_queries)
    positions = starts + torch.arange(num_queries)
    full = ragged_mask(positions, length, window=None, group=2, dtype=dtype)
    single = full[:, :, :num_queries]
    expected = reference(query, key, value, single.double(), 2, scale)
    for mask in (full, single):  # a mask that was not repeated yet is accepted too
        got = ragged_attention(query, key, value, mask, scaling=scale)
        torch.testing.assert_close(got.double(), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("batch", [1, 20])
def test_without_a_mask_one_query_sees_all_and_several_are_causal(batch):
    for num_queries, length in ((1, 13), (5, 5)):
        query, key, value = tensors(batch, num_queries, length, torch.float32)
        causal = torch.ones(num_queries, length).tril(length - num_queries).log().double()
        got = ragged_attention(query, key, value, None)
        expected = reference(query, key, value, causal, 2, None)
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)


def test_batched_products_are_chosen_for_many_bfloat16_rows_only(monkeypatch):
    chosen = []

    def spy(*args):
        chosen.append(True)
        return products_attention(*args)

    monkeypatch.setattr(attention, "products_attention", spy)
    for batch, num_queries, dtype in (
        (20, 1, torch.bfloat16),
        (20, 1, torch.float32),
        (2, 1, torch.bfloat16),
        (20, 40, torch.bfloat16),
    ):
        query, key, value = tensors(batch, num_queries, 50, dtype)
        mask = torch.zeros(batch, 1, 2 * num_queries, 50, dtype=dtype)
        ragged_attention(query, key, value, mask)
    assert chosen == [True]


def test_batched_products_copy_no_keys():
    _, key, value = tensors(20, 1, 13, torch.bfloat16)
    assert key.flatten(0, 1).data_ptr() == key.data_ptr()
    assert value.flatten(0, 1).data_ptr() == value.data_ptr()
