"""Tags of messages: those that Syncline keeps for itself, and the tags under which messages travel.

On the wire a message has the caller's tag and a code of its dtype, so that only tensors of one dtype meet.
"""

from __future__ import annotations

import torch

from ..errors import InvalidArgumentError

#: A program may use no tag from the first to the second.
FIRST_RESERVED, LAST_RESERVED = 32_000, 32_767


class ReservedTag(int):
    """One of them. `send` and `recv` take it, and refuse a plain number of the same value."""


#: The messages of NCCL groups that agree over a host group: one of these for each topic.
FIRST_NCCL_AGREEMENT, NCCL_AGREEMENTS = FIRST_RESERVED, 700
CONTROL = ReservedTag(32_764)
MONITORED_BARRIER = ReservedTag(32_765)
TRACE_CLOCK = ReservedTag(32_766)


def is_reserved(tag: int) -> bool:
    """Whether a program may not use it."""
    return FIRST_RESERVED <= tag <= LAST_RESERVED and not isinstance(tag, ReservedTag)


# ---- on the wire ----

# The place of a dtype here is its code. Append only: ranks may run other versions of torch.
_DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "complex64", "complex128", "complex32"),
    *("int64", "int32", "int16", "int8", "uint8", "bool", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_CODES: dict[torch.dtype, int] = {getattr(torch, name): code for code, name in enumerate(_DTYPES) if hasattr(torch, name)}
_BITS = 5
# So that all tags up to 32,767 can be coded, which is what MPI promises to take.
_LEAST = 2 ** (15 + _BITS) - 1
#: How many codes there are for numbers of elements: a prime, for differences are often multiples of powers of 2.
SIZES = 2039
_OTHER_DTYPE = 2**_BITS - 1


def wire_tag(tag: int, dtype: torch.dtype, largest: int) -> int:
    """The tag of a message on the wire. A library with very few tags gets the caller's, and dtypes are not told apart.

    Args:
        tag: the caller's.
        dtype: of the tensor.
        largest: that the library takes.

    Raises:
        InvalidArgumentError: the tag is too large.
    """
    if largest < _LEAST:
        return tag
    coded: int = tag << _BITS | _CODES.get(dtype, _OTHER_DTYPE)
    if coded > largest:
        raise InvalidArgumentError(f"expected a tag of at most {largest >> _BITS} over this library, found {tag}")
    return coded


def sized_wire_tag(tag: int, dtype: torch.dtype, numel: int, largest: int) -> int:
    """The same with a code of the number of elements, for a library that delivers messages of any size.

    Numbers that differ by a multiple of `SIZES` are not told apart.
    """
    return wire_tag(tag, dtype, largest // SIZES) * SIZES + numel % SIZES
