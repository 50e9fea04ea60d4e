"""Tags of messages: the tags that Syncline reserves, and the tags on the wire.

On the wire, a tag contains a code of the tensor's dtype, so a receive only matches sends of the same dtype.
"""

from __future__ import annotations

import torch

from ..errors import InvalidArgumentError

#: Programs must not use these two tags, nor the tags between them.
FIRST_RESERVED, LAST_RESERVED = 32_000, 32_767


class ReservedTag(int):
    """A tag that only Syncline uses. `send` and `recv` accept this type, but refuse a plain int with the same value."""


#: The ranks of an NCCL group exchange messages over another group, on the host (CPU). These constants are the first tag of
#: these messages, and the number of their tags. A message's topic determines its tag. Two topics may have the same tag.
FIRST_NCCL_AGREEMENT, NCCL_AGREEMENTS = FIRST_RESERVED, 700
LAST_MESSAGE = ReservedTag(32_763)
CONTROL = ReservedTag(32_764)
MONITORED_BARRIER = ReservedTag(32_765)
TRACE_CLOCK = ReservedTag(32_766)


def is_reserved(tag: int) -> bool:
    """Whether a program must not use this tag. False for a `ReservedTag`, which only Syncline uses."""
    # `int`: a comparison of an 8-bit integer of another library with 32000 would overflow.
    return FIRST_RESERVED <= int(tag) <= LAST_RESERVED and not isinstance(tag, ReservedTag)


# ---- on the wire ----

# A dtype's index in this tuple is its code. Add new dtypes only at the end: ranks may run different versions of torch, and must
# agree on the codes.
_DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "complex64", "complex128", "complex32"),
    *("int64", "int32", "int16", "int8", "uint8", "bool", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_CODES: dict[torch.dtype, int] = {getattr(torch, name): code for code, name in enumerate(_DTYPES) if hasattr(torch, name)}
_BITS = 5
# If a library takes wire tags up to this value, every tag up to 32,767 can be coded. (MPI guarantees tags up to 32,767.)
_LEAST = 2 ** (15 + _BITS) - 1
#: How many codes there are for a tensor's number of elements. The value is a prime, because differences between sizes are
#: often multiples of powers of 2.
SIZES = 2039
_OTHER_DTYPE = 2**_BITS - 1


def wire_tag(tag: int, dtype: torch.dtype, largest: int) -> int:
    """Return the tag of a message on the wire. This tag contains the caller's tag and the dtype.

    `largest` is the largest tag that the library takes. If `largest` is too small for the dtype, return the caller's tag alone.

    Raises:
        InvalidArgumentError: the caller's tag is too large for this library.
    """
    # There is no room for the dtype, so a receive may match a send of another dtype. But all tags of the program still work.
    if largest < _LEAST:
        return tag
    coded: int = tag << _BITS | _CODES.get(dtype, _OTHER_DTYPE)
    if coded > largest:
        raise InvalidArgumentError(f"expected a tag of at most {largest >> _BITS} over this library, found {tag}")
    return coded


def sized_wire_tag(tag: int, dtype: torch.dtype, numel: int, largest: int) -> int:
    """Return a tag like that of `wire_tag`. This tag also contains the number of elements modulo 2039 (`SIZES`).

    Use this function if the library does not check the size of a message.
    """
    return wire_tag(tag, dtype, largest // SIZES) * SIZES + numel % SIZES
