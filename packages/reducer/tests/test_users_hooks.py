"""Hooks that users register on parameters, before and after ours: what they do to a gradient is reduced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from syncline.collectives import ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.reducer import Reducer
from syncline.reducer.gradient_hooks import GradientHooks
from syncline.reducer.pending_gradients import PendingBucket, PendingGradients
from test_support.training_runs import VIEWS

pytestmark = pytest.mark.ranks

COUNT = 5
OPTIONS = [{}, {"static_graph": True}, {"find_unused_parameters": True}, {"delayed": ["p1"]}]
# In which order gradients arrive, by step: also otherwise than learnt in the first one.
ARRIVALS = [[4, 3, 2, 1, 0], [4, 3, 2, 1, 0], [0, 1, 2, 3, 4], [2, 4, 0, 3, 1], [2, 4, 0, 3, 1]]


def coefficient(rank: int, index: int, step: int) -> torch.Tensor:
    return torch.arange(1, index + 2, dtype=torch.float64) * (rank + 1) + 10 * index + 100 * step


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("cap", [0, 40, 1 << 20])
def test_every_gradient_is_reduced_as_they_left_it(as_view: bool, options: Any, cap: int) -> None:
    """In whatever order gradients arrive, none is collected before all hooks on it have run."""

    def body(group: ProcessGroup) -> list[list[torch.Tensor]]:
        parameters = [(f"p{i}", torch.nn.Parameter(torch.ones(i + 1, dtype=torch.float64))) for i in range(COUNT)]

        def scale(factor: float) -> None:
            def hook(parameter: torch.Tensor) -> None:
                assert parameter.grad is not None
                parameter.grad.mul_(factor)

            for _, parameter in parameters:
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

        scale(3.0)
        reducer = Reducer(parameters, group, bucket_cap_bytes=cap, gradient_as_bucket_view=as_view, **options)
        scale(5.0)
        found = []
        for step, arrival in enumerate(ARRIVALS):
            if step == 3:
                scale(7.0)
            for _, parameter in parameters:
                parameter.grad = None
            reducer.prepare_for_backward()
            total = torch.zeros((), dtype=torch.float64)
            for index in reversed(arrival):  # autograd visits the latest node first
                total = total + (parameters[index][1] * coefficient(group.rank, index, step)).sum()
            total.backward()
            found.append([parameter.grad.clone() for _, parameter in parameters if parameter.grad is not None])
        return found

    for found in run_ranks(2, body):
        for step, gradients in enumerate(found):
            factor = 3.0 * 5.0 * (1.0 if step < 3 else 7.0)
            expected = [factor * (coefficient(0, i, step) + coefficient(1, i, step)) / 2 for i in range(COUNT)]
            torch.testing.assert_close(gradients, expected, rtol=1e-14, atol=0)


def test_a_hook_on_a_parameters_node_in_the_graph() -> None:
    """As on native DDP: what was registered before the reducer counts."""

    def body(group: ProcessGroup) -> torch.Tensor | None:
        parameter = torch.nn.Parameter(torch.ones(2))
        node = torch.autograd.graph.get_gradient_edge(parameter).node

        def scale(*_: Any) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(3.0)

        node.register_hook(scale)
        reducer = Reducer([("p", parameter)], group)
        reducer.prepare_for_backward()
        (parameter * (group.rank + 1.0)).sum().backward()
        return parameter.grad

    for gradient in run_ranks(2, body):
        assert gradient is not None
        assert gradient.tolist() == [4.5, 4.5]


def test_closing_takes_all_hooks_off() -> None:
    def body(group: ProcessGroup) -> None:
        parameter = torch.nn.Parameter(torch.ones(2))
        Reducer([("p", parameter)], group).close()
        (parameter * (group.rank + 1.0)).sum().backward()
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [group.rank + 1.0] * 2

    run_ranks(2, body)


def test_all_nodes_of_parameters_on_an_accelerator_are_held() -> None:
    """A node belongs to the stream on which it was made; nobody would wait for one that a forward made on another stream.

    The device "meta" stands for a GPU: it is none of the host's.
    """

    def body(group: ProcessGroup) -> None:
        parameters = [torch.nn.Parameter(torch.ones(2, device="meta")) for _ in range(COUNT)]
        hooks = GradientHooks(
            parameters,
            group,
            delayed=(),
            reads_in_place=False,
            wake=Deaf().wake,
            node_done=Deaf().node_done,
            retire=Deaf().retire,
        )
        for members in ([[4, 3], [2, 1, 0]], [[0, 1, 2], [3, 4]]):  # as built first, and as rebuilt
            hooks.register(PendingGradients(members))
            for index, parameter in enumerate(parameters):
                torch.autograd.graph.get_gradient_edge(parameter).node.metadata["index"] = index
            found = [torch.autograd.graph.get_gradient_edge(parameter).node.metadata.get("index") for parameter in parameters]
            assert found == list(range(COUNT)), "a node that nobody holds is made anew, without what was left on it"

    run_ranks(1, body)


class Deaf:
    """Whom hooks would tell."""

    def wake(self, bucket: PendingBucket) -> None:
        """Not to be called."""

    def node_done(self, index: int, bucket: PendingBucket) -> None:
        """Not to be called."""

    def retire(self) -> bool:
        """Not to be called."""
        raise AssertionError
