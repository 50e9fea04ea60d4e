from __future__ import annotations

import copy

import pytest
import torch

from syncline.collectives import DisagreementError, ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.reducer import verify_same_options, verify_same_parameters

pytestmark = pytest.mark.ranks

Model = list[tuple[str, torch.Tensor]]
REFERENCE: Model = [
    ("conv.weight", torch.nn.Parameter(torch.zeros(4, 3, 2, 2))),
    ("fc.weight", torch.nn.Parameter(torch.zeros(5, 7))),
    ("fc.bias", torch.nn.Parameter(torch.zeros(5))),
    ("bn.running_mean", torch.zeros(2)),
]


def complaint_of(group: ProcessGroup, models: list[Model]) -> str | None:
    """The text of the error on this rank, if there is one."""
    model = models[group.rank]
    try:
        verify_same_parameters([name for name, _ in model], [tensor for _, tensor in model], group=group)
    except DisagreementError as error:
        return str(error)
    return None


def replaced(name: str, tensor: torch.Tensor) -> Model:
    """The reference with another tensor of the same kind in one place."""
    is_parameter = name != "bn.running_mean" and not isinstance(tensor, torch.nn.Parameter)
    return [(n, (torch.nn.Parameter(tensor) if is_parameter else tensor) if n == name else t) for n, t in REFERENCE]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_models_pass_whatever_their_values(world_size: int) -> None:
    models = [copy.deepcopy(REFERENCE) for _ in range(world_size)]
    for rank, model in enumerate(models):
        for _, tensor in model:
            tensor.detach().fill_(rank)

    assert run_ranks(world_size, complaint_of, models) == [None] * world_size


DIFFERENCES = {
    "shape": (
        replaced("fc.weight", torch.zeros(6, 7)),
        ["'fc.weight'", "float32[5, 7] with strides [7, 1] on rank 0", "float32[6, 7] with strides [7, 1] on rank 1"],
    ),
    "dtype": (
        replaced("fc.bias", torch.zeros(5, dtype=torch.float64)),
        ["'fc.bias'", "float32[5]", "on rank 0", "float64[5]", "on rank 1"],
    ),
    "strides": (
        replaced("conv.weight", torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)),
        ["'conv.weight'", "strides [12, 4, 2, 1] on rank 0", "strides [12, 1, 6, 3] on rank 1"],
    ),
    "frozen": (
        replaced("fc.bias", torch.nn.Parameter(torch.zeros(5), requires_grad=False)),
        ["parameter 'fc.bias'", "float32[5] with strides [1] on rank 0", "float32[5] with strides [1] (frozen) on rank 1"],
    ),
    "buffer": (
        replaced("bn.running_mean", torch.zeros(3)),
        ["buffer 'bn.running_mean'", "float32[2]", "on rank 0", "float32[3]", "on rank 1"],
    ),
    "missing": (
        [*REFERENCE[:2], REFERENCE[3]],
        ["parameter 'fc.bias'", "float32[5]", "missing on rank 1", "(4 and 3 in all)"],
    ),
    "additional": (
        [*REFERENCE, ("head.bias", torch.nn.Parameter(torch.zeros(9)))],
        ["parameter 'head.bias'", "missing on rank 0", "float32[9] with strides [1] on rank 1", "(4 and 5 in all)"],
    ),
    "name": (
        [*REFERENCE[:2], ("fc.beta", torch.nn.Parameter(torch.zeros(5))), REFERENCE[3]],
        ["parameter 'fc.bias'", "float32[5] with strides [1] on rank 0", "missing on rank 1"],
    ),
    "order": ([REFERENCE[1], REFERENCE[0], *REFERENCE[2:]], ["rank 1 has the parameters of rank 0 in another order"]),
    "everything": ([], ["parameter 'conv.weight'", "missing on rank 1", "(4 and 0 in all)"]),
}


@pytest.mark.parametrize("kind", DIFFERENCES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_difference_is_named_on_every_rank(kind: str, world_size: int) -> None:
    other, words = DIFFERENCES[kind]
    models = [REFERENCE, other, REFERENCE][:world_size]

    for rank, text in enumerate(run_ranks(world_size, complaint_of, models)):
        assert text is not None
        for word in [*words, f"rank {rank} of {world_size}"]:
            assert word in text


def test_the_rank_that_differs_is_named() -> None:
    models = [REFERENCE, REFERENCE, replaced("fc.bias", torch.zeros(6)), REFERENCE]

    for text in run_ranks(4, complaint_of, models):
        assert text is not None
        assert "float32[6] with strides [1] on rank 2" in text


OPTIONS = {"cap": 3, "caps": [1, 2], "view": False, "until": None}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_equal_options_pass(world_size: int) -> None:
    run_ranks(world_size, lambda group: verify_same_options({**OPTIONS, "caps": [1, 2]}, group=group))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"cap": 4}, "found cap=3 on rank 0 and 4 on rank 2. Pass"),
        ({"caps": [1]}, "found caps=[1, 2] on rank 0 and [1] on rank 2. Pass"),
        (
            {"view": True, "until": "x"},
            "found view=False on rank 0 and True on rank 2, until=None on rank 0 and 'x' on rank 2. Pass",
        ),
    ],
)
def test_options_that_differ_are_named_with_both_values(other: dict[str, object], words: str) -> None:
    def body(group: ProcessGroup) -> str:
        with pytest.raises(DisagreementError) as caught:
            verify_same_options({**OPTIONS, **(other if group.rank == 2 else {})}, group=group)
        return str(caught.value)

    for rank, text in enumerate(run_ranks(3, body)):
        assert words in text
        assert f"rank {rank} of 3" in text


def test_options_that_are_equal_numbers_of_two_types_pass() -> None:
    run_ranks(2, lambda group: verify_same_options({**OPTIONS, "cap": 3.0 if group.rank else 3}, group=group))
