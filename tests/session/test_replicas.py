"""The digest that tells whether replicas are the same."""

import pytest
import torch

from hipress.session.replicas import COLUMNS, digest, digests

SIZES = [1, 3, 4, 5, 4095, 4096, 4097, 3 * COLUMNS, 3 * COLUMNS + 5]


def sample(numel, dtype=torch.float32):
    generator = torch.Generator().manual_seed(numel)
    return torch.randn(numel, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("numel", SIZES)
def test_one_bit_makes_a_difference(numel, dtype):
    """Catches: elements that are left out: the last, those after a full row, odd byte counts."""
    value = sample(numel, dtype)
    before = digest(value)
    assert digest(value.clone()) == before
    for place in {0, numel // 2, numel - 1}:
        for byte in range(value.element_size()):
            changed = value.clone()
            changed.view(torch.uint8)[place * value.element_size() + byte] ^= 1
            assert digest(changed) != before, (place, byte)


@pytest.mark.parametrize("numel", [5, 4097, 3 * COLUMNS + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_order_makes_a_difference(numel, dtype):
    """Catches: a plain sum: swapped elements, rows and columns."""
    value = sample(numel, dtype)
    before = digest(value)
    last = numel - 1
    pairs = [(0, 1), (0, last), (last - 1, last)]
    if numel > 2 * COLUMNS:
        pairs += [(0, COLUMNS), (7, COLUMNS + 7), (0, 2 * COLUMNS + 1)]
    for a, b in pairs:
        changed = value.clone()
        changed[[a, b]] = changed[[b, a]]
        assert digest(changed) != before, (a, b)
    assert digest(value.flip(0)) != before


def test_rows_that_are_swapped_whole():
    """Catches: sums over columns alone."""
    value = sample(2 * COLUMNS)
    swapped = torch.cat([value[COLUMNS:], value[:COLUMNS]])
    assert digest(swapped) != digest(value)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7])
def test_odd_byte_counts(count):
    """Catches: bytes behind the last whole word that are left out."""
    value = torch.arange(count, dtype=torch.uint8)
    changed = value.clone()
    changed[-1] += 1
    assert digest(changed) != digest(value)


def test_zeros_of_both_signs_differ():
    """Catches: a comparison of values, where replicas must agree in bits."""
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


def test_nan_and_infinity():
    """Catches: arithmetic on values, where NaN equals nothing."""
    value = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    assert digest(value) == digest(value.clone())


def test_empty_and_shapes_and_strides():
    """Catches: errors for what models may hold: no elements, no dimension, other strides."""
    assert digest(torch.empty(0)) == digest(torch.empty(0, 3))
    assert digest(torch.tensor(2.0)) == digest(torch.tensor([2.0]))
    value = sample(12).view(3, 4)
    assert digest(value.t()) == digest(value.t().contiguous())
    assert digest(value.t()) != digest(value)
    assert digest(value.requires_grad_()) == digest(value.detach())


def test_digests_are_text_by_name():
    """Catches: numbers that JSON does not carry."""
    found = digests([("w", sample(10)), ("v", -sample(10))])
    assert list(found) == ["w", "v"]
    assert all(len(text) == 16 and int(text, 16) >= 0 for text in found.values())
    assert found["w"] != found["v"]


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype_at_any_offset(dtype, offset):
    """Catches: a view that begins between two words, such as a part of a flat parameter."""
    for numel in (0, 1, 7, COLUMNS + 3):
        whole = torch.arange(numel + offset).remainder(2).to(dtype)
        view = whole[offset:]
        assert digest(view) == digest(view.clone())
        if numel:
            changed = whole.clone()[offset:]
            changed[-1] = torch.tensor(1 - int(changed[-1].real), dtype=dtype)
            assert digest(changed) != digest(view)


def test_memory_that_is_not_aligned():
    """Catches: a tensor over a file or a buffer that begins at an odd byte."""
    raw = bytearray(range(64))
    for start in range(5):
        value = torch.frombuffer(raw, dtype=torch.uint8, offset=start, count=32)
        assert digest(value) == digest(value.clone())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_any_layout():
    """Catches: errors for sparse, conjugated, expanded and blocked tensors."""
    value = sample(12).view(3, 4)
    assert digest(value.to_sparse()) == digest(value)
    assert digest(value.to_sparse_csr()) == digest(value)
    row = sample(4).expand(3, 4)
    assert digest(row) == digest(row.contiguous())
    numbers = torch.complex(sample(6), -sample(6))
    assert digest(numbers.conj()) == digest(numbers.conj().resolve_conj()) != digest(numbers)
    assert digest(numbers.conj().imag) == digest(numbers.conj().imag.resolve_neg())
    images = sample(48).view(2, 2, 3, 4).to(memory_format=torch.channels_last)
    assert digest(images) == digest(images.contiguous())
