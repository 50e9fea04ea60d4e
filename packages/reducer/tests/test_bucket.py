from __future__ import annotations

import pytest
import torch

from syncline.collectives import MisuseError
from syncline.collectives.transports.threads import create_groups
from syncline.reducer.bucket import Bucket, Layout
from syncline.reducer.grad_bucket import GradBucket


def make_bucket(*tensors: torch.Tensor, as_view: bool = False) -> Bucket:
    (group,) = create_groups(1)
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
    names, layouts = [f"p{i}" for i in range(len(parameters))], list(map(Layout.of, parameters))
    return Bucket(range(len(parameters)), parameters, names, layouts, group, as_view=as_view)


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 1


LAYOUTS = {
    "contiguous": numbered(2, 3, 4),
    "scalar": torch.tensor(1.0),
    "empty": torch.empty(0, 3),
    "channels-last": numbered(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels-last, one channel": numbered(2, 1, 4, 5).to(memory_format=torch.channels_last),
    "transposed": numbered(4, 3).t(),
    "permuted": numbered(2, 3, 4).permute(2, 0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dense_parameter_has_a_view_with_its_strides(layout: str) -> None:
    tensor = LAYOUTS[layout]
    bucket = make_bucket(torch.zeros(3), tensor, torch.zeros(2))
    view = bucket.views[1]

    assert view.shape == tensor.shape
    assert view.stride() == tensor.stride()
    assert bucket.buffer.shape == (3 + tensor.numel() + 2,)
    view.copy_(tensor)
    in_memory_order = torch.as_strided(tensor, (tensor.numel(),), (1,))
    assert torch.equal(bucket.buffer[3 : 3 + tensor.numel()], in_memory_order)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(numbered(3, 1).expand(3, 4), id="expanded: elements share memory"),
        pytest.param(torch.as_strided(numbered(6), (3, 3), (1, 1)), id="overlapping"),
        pytest.param(numbered(4, 6)[:, ::2], id="with gaps"),
    ],
)
def test_a_parameter_that_does_not_fill_its_memory_has_a_contiguous_view(tensor: torch.Tensor) -> None:
    bucket = make_bucket(tensor, torch.zeros(2))

    assert bucket.views[0].is_contiguous()
    assert bucket.buffer.numel() == tensor.numel() + 2
    bucket.buffer.zero_()
    bucket.views[0].fill_(7.0)
    assert bucket.buffer[-2:].tolist() == [0.0, 0.0]
    assert bucket.views[0].shape == tensor.shape


def test_the_views_tile_the_buffer_without_gap_or_overlap() -> None:
    bucket = make_bucket(*LAYOUTS.values())
    for number, view in enumerate(bucket.views):
        view.fill_(float(number))

    expected = [float(n) for n, tensor in enumerate(LAYOUTS.values()) for _ in range(tensor.numel())]
    assert bucket.buffer.tolist() == expected


def test_collect_copies_gradients_of_any_stride_and_deliver_copies_them_back() -> None:
    bucket = make_bucket(torch.zeros(2, 3), torch.zeros(4))
    first, second = bucket.parameters
    first.grad, second.grad = numbered(3, 2).t(), numbered(4)

    bucket.collect()

    assert bucket.buffer.tolist() == [1, 3, 5, 2, 4, 6, 1, 2, 3, 4]
    bucket.buffer.mul_(10)
    own = first.grad
    bucket.deliver()
    assert first.grad is own
    assert first.grad.tolist() == [[10, 30, 50], [20, 40, 60]]
    assert second.grad.tolist() == [10, 20, 30, 40]


def test_collect_copies_only_gradients_that_are_no_views_of_the_bucket() -> None:
    bucket = make_bucket(torch.zeros(2), torch.zeros(2), as_view=True)
    first, second = bucket.parameters
    bucket.deliver()
    assert first.grad is bucket.views[0]
    bucket.buffer.copy_(numbered(4))
    version = bucket.views[0]._version
    second.grad = torch.tensor([8.0, 9.0])

    bucket.collect()

    assert bucket.buffer.tolist() == [1, 2, 8, 9]
    assert bucket.views[0]._version == version + 1, "one copy, of the second gradient only"
    assert second.grad is bucket.views[1]

    bucket.collect()
    assert bucket.views[0]._version == version + 1, "both are in place: nothing to copy"


def test_a_gradient_that_is_none_counts_as_zeros_and_is_left_none_if_nobody_has_one() -> None:
    bucket = make_bucket(torch.zeros(2), torch.zeros(3))
    first, second = bucket.parameters
    first.grad = numbered(2)
    bucket.buffer.fill_(7.0)
    bucket.collect(unused={1})
    assert bucket.buffer.tolist() == [*numbered(2).tolist(), 0, 0, 0]
    bucket.deliver(untouched={1})
    assert second.grad is None
    bucket.deliver()
    assert second.grad is not None
    assert second.grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("missing", [False, True])
def test_vectors_come_and_go_like_other_shapes(as_view: bool, missing: bool) -> None:
    """They are concatenated if all are there, and copied one by one if not; a stride and an empty one make no difference."""
    bucket = make_bucket(torch.zeros(3), torch.zeros(0), torch.zeros(2), as_view=as_view)
    given = [numbered(3, 2)[:, 1], torch.zeros(0), None if missing else 10 * numbered(2)]
    for parameter, gradient in zip(bucket.parameters, given, strict=True):
        parameter.grad = gradient

    bucket.collect()
    last = [0.0, 0.0] if missing else [10.0, 20.0]
    assert bucket.buffer.tolist() == [2, 4, 6, *last]

    bucket.buffer.mul_(2)
    bucket.deliver()
    assert [parameter.grad.tolist() for parameter in bucket.parameters] == [  # type: ignore[union-attr]
        [4, 8, 12],
        [],
        [2 * value for value in last],
    ]


@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize(
    ("gradient", "error"),
    [
        pytest.param(
            torch.eye(2).double(),
            r"gradient of torch\.float32 for parameter 'p1' on rank 0 of 1.*found torch\.float64: leave its `grad_dtype` unset",
            id="dtype",
        ),
        pytest.param(torch.eye(2).to_sparse(), r"parameter 'p1' on rank 0 of 1.*found layout torch\.sparse_coo", id="sparse"),
    ],
)
def test_collect_refuses(gradient: torch.Tensor, error: str, vectors: bool) -> None:
    example = torch.zeros(2) if vectors else torch.zeros(2, 2)
    bucket = make_bucket(example, example)
    first, second = bucket.parameters
    if gradient.dtype is not example.dtype and not hasattr(second, "grad_dtype"):
        pytest.skip("this torch lets no parameter have a gradient of another dtype")
    second.grad_dtype = None  # any: what a cast after wrapping and some tensor subclasses bring
    if vectors:
        gradient = gradient.to_dense()[0]
        gradient = gradient.to_sparse() if "sparse" in error else gradient
    first.grad, second.grad = torch.ones_like(example), gradient

    with pytest.raises(MisuseError, match=error):
        bucket.collect()


def test_accept_takes_another_tensor_and_skips_its_own() -> None:
    bucket = make_bucket(torch.zeros(2, 2))
    bucket.buffer.zero_()
    version = bucket.buffer._version

    bucket.accept(bucket.buffer)
    assert bucket.buffer._version == version

    bucket.accept(numbered(4))
    assert bucket.buffer.tolist() == [1, 2, 3, 4]

    bucket.accept(numbered(2, 2).t())
    assert bucket.buffer.tolist() == [1, 3, 2, 4], "another shape and strides, as many elements"


@pytest.mark.parametrize("numel", [0, 3, 5])
def test_accept_refuses_another_size(numel: int) -> None:
    bucket = make_bucket(torch.zeros(2), torch.zeros(2))

    with pytest.raises(MisuseError, match=rf"a bucket of 4 elements and returned {numel};.*Parameters in it: p0, p1"):
        bucket.accept(torch.zeros(numel))


@pytest.mark.parametrize("result", [None, 3, "four"])
def test_accept_refuses_what_is_no_tensor(result: object) -> None:
    bucket = make_bucket(torch.zeros(4))

    with pytest.raises(MisuseError, match=f"returned a future of {type(result).__name__}"):
        bucket.accept(result)


def test_grad_bucket_shows_the_bucket_and_can_show_another_buffer() -> None:
    (group,) = create_groups(1)
    bucket = make_bucket(torch.zeros(2, 2), torch.zeros(3))
    bucket.buffer.copy_(numbered(7))

    shown = GradBucket(bucket, 3, True, group)

    assert shown.index() == 3
    assert shown.is_last() is True
    assert shown.buffer() is bucket.buffer
    assert shown.process_group() is group
    assert all(a is b for a, b in zip(shown.parameters(), bucket.parameters, strict=True))
    assert shown.parameter_names() == ["p0", "p1"]
    assert [gradient.tolist() for gradient in shown.gradients()] == [[[1, 2], [3, 4]], [5, 6, 7]]

    replacement = numbered(7) * 10
    shown.set_buffer(replacement)
    assert shown.buffer() is replacement
    assert [gradient.tolist() for gradient in shown.gradients()] == [[[10, 20], [30, 40]], [50, 60, 70]]
    assert bucket.buffer.tolist() == [1, 2, 3, 4, 5, 6, 7], "the bucket's own memory is as it was"


@pytest.mark.parametrize("step", [1, 2])
def test_grad_bucket_shows_a_buffer_whose_elements_have_gaps(step: int) -> None:
    (group,) = create_groups(1)
    bucket = make_bucket(torch.zeros(2, 2).t(), torch.zeros(3))
    shown = GradBucket(bucket, 0, False, group)
    memory = numbered(20)
    shown.set_buffer(memory.as_strided((7,), (step,), 1))
    values = [2.0 + step * position for position in range(7)]
    first, second = shown.gradients()
    assert first.t().flatten().tolist() + second.tolist() == values
    second.fill_(0)
    assert shown.buffer()[4:].tolist() == [0, 0, 0], "it is a view"


def test_accept_refuses_another_dtype_than_the_hook_was_given() -> None:
    bucket = make_bucket(torch.zeros(2))
    with pytest.raises(
        MisuseError, match=r"given a bucket of torch\.float32.*returned one of torch\.float16.*convert in the hook.*p0"
    ):
        bucket.accept(torch.zeros(2, dtype=torch.float16))
