from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syncline.collectives.tensors.layout import bytes_of, contents, in_one_block, in_plain_order, overlaps_itself


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((), (), False),
        ((5,), (1,), False),
        ((5,), (0,), True),
        ((1,), (0,), False),
        ((0, 5), (0, 0), False),
        ((3, 4), (4, 1), False),
        ((4, 3), (1, 4), False),
        ((3, 4), (0, 1), True),
        ((4, 3), (1, 1), True),
        ((2, 3), (3, 2), False),  # interleaved, and yet apart
        ((3, 3), (3, 2), False),
        ((3, 4), (3, 2), True),
        ((3, 4), (8, 2), False),
    ],
)
def test_table(shape: tuple[int, ...], strides: tuple[int, ...], expected: bool) -> None:
    assert overlaps_itself(shape, strides) is expected


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=4))
def test_against_counting(dimensions: list[tuple[int, int]]) -> None:
    shape = tuple(length for length, _ in dimensions)
    strides = tuple(stride for _, stride in dimensions)
    places = [0]
    for length, stride in dimensions:
        places = [place + step * stride for place in places for step in range(length)]
    assert overlaps_itself(shape, strides) is (len(set(places)) < len(places))


def test_in_plain_order_copies_only_where_it_must() -> None:
    plain = torch.arange(6.0).reshape(2, 3)
    assert in_plain_order(plain) is plain
    assert in_plain_order(plain.t()).tolist() == plain.t().tolist()
    assert in_plain_order(plain.t()).is_contiguous()
    marked = torch.complex(plain, plain).conj()
    assert not in_plain_order(marked).is_conj()
    assert not in_plain_order(marked.imag).is_neg()
    assert in_plain_order(marked.imag).tolist() == (-plain).tolist()


def test_bytes_of_shares_memory() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.int16)
    bytes_of(tensor)[2] = 7
    assert tensor.tolist() == [[0, 7, 0], [0, 0, 0]]
    assert bytes_of(torch.zeros(0)).shape == (0,)
    single = torch.zeros(4)[1::2][:1]
    assert bytes_of(single).shape == (4,)


def test_contents_are_counted_in_64_bits() -> None:
    """Nothing here touches the memory, which the system so never gives."""
    small = torch.arange(7, dtype=torch.uint8)
    assert bytes(contents(small)) == bytes(range(7))
    assert bytes(contents(small[:0])) == b""
    large = torch.empty(2**32 + 5, dtype=torch.uint8)
    large[-3:] = torch.tensor([7, 8, 9])
    assert len(contents(large)) == 2**32 + 5
    assert bytes(contents(large)[2**32 + 2 :]) == bytes([7, 8, 9])


def test_overlaps_are_found_on_any_default_device() -> None:
    with torch.device("meta"):
        assert overlaps_itself((2, 3), (1, 1))
        assert not overlaps_itself((2, 2, 2), (3, 2, 7))


def test_the_block_of_one_tensor_is_a_copy() -> None:
    """In a group of one rank, an output may lie in the memory of the only input. MPI ends the job then."""
    tensor = torch.arange(4.0)
    block = in_one_block([tensor])
    tensor.zero_()
    assert block.tolist() == [0.0, 1.0, 2.0, 3.0]
