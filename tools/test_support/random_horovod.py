"""Random training programs under Horovod's names. All ranks train, and one process alone computes what they should get.

`play` compares the results after every step. One process alone has a model for each rank, and combines the gradients of
these models as Horovod documents it.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from typing import Any

import torch

import syncline.horovod as hvd

from .random_training import (
    BLOCKS,
    HEAD,
    assert_equal_on_all_ranks,
    compare,
    dense_gradients,
    inputs_of,
    loss_of,
    make_block,
    make_net,
    set_values,
)

STEPS = 7


@dataclass
class Step:
    """What all ranks do in a step.

    Attributes:
        changes: changes before the step: a verb, a block's name, and for "add" the block's kind.
        clear: what happens to gradients before the step: "none" sets them to None, "zero" to zeros, "keep" leaves them.
        backwards: for each rank, the blocks that each of its backwards reaches.
        sets: for each rank, the blocks whose gradients the script sets after the backwards.
        way: how gradients are combined: "step", "synchronize" (then clip, then step), "closure", or "leave out" (no step).
    """

    changes: list[tuple[str, ...]]
    clear: str
    backwards: list[list[list[str]]]
    sets: list[list[str]]
    way: str


@dataclass
class Program:
    """A random program.

    Attributes:
        blocks: names and kinds of the first blocks.
        frozen: the blocks that need no gradient at first.
        options: for `DistributedOptimizer`.
        momentum: of SGD.
        steps: the steps.
        uneven: for each rank, how many more steps it makes before it joins; None: no rank joins.
    """

    blocks: dict[str, str]
    frozen: list[str]
    options: dict[str, Any]
    momentum: float
    steps: list[Step] = field(default_factory=list)
    uneven: list[int] | None = None


def draw(seed: int, world_size: int) -> Program:
    """Return the program that belongs to a seed. It is valid for this number of ranks."""
    pick = random.Random(f"horovod {seed} {world_size}")
    blocks = {HEAD: "linear", **{f"b{index}": pick.choice(list(BLOCKS)) for index in range(pick.randint(1, 4))}}
    passes = pick.choice([1, 1, 2, 3])
    options: dict[str, Any] = {"backward_passes_per_step": passes, "groups": pick.choice([None, None, 2])}
    op = pick.choice(["Average", "Average", "Average", "Sum"])
    options["op"] = getattr(hvd, op)
    if op == "Average" and pick.random() < 0.3:
        options["gradient_predivide_factor"] = 2.0
    options["sparse_as_dense"] = pick.random() < 0.5
    program = Program(blocks, [], options, pick.choice([0.0, 0.9]))
    if options["groups"] or "gradient_predivide_factor" in options or program.momentum:
        program.blocks = blocks = {name: "words" if kind == "sparse words" else kind for name, kind in blocks.items()}
    # The first backward must show that the model has re-entrant checkpoints.
    always = {name for name, kind in blocks.items() if kind == "re-entrant" or name == HEAD}
    program.frozen = [name for name in blocks if name not in always and pick.random() < 0.15]
    present = dict(blocks)
    for number in range(STEPS):
        changes: list[tuple[str, ...]] = []
        others = [name for name in present if name not in always]
        if number and others and pick.random() < 0.35:
            verb = pick.choice(["freeze", "unfreeze", "add"])
            if verb == "add":
                kind = pick.choice([kind for kind in BLOCKS if kind != "sparse words"])
                present[f"n{number}"] = kind
                changes = [(verb, f"n{number}", kind)]
            else:
                changes = [(verb, pick.choice(others))]

        def some(present: dict[str, str] = present) -> list[str]:
            return [name for name in present if name in always or pick.random() < 0.6]

        everything = pick.random() < 0.5
        least = 0 if passes > 1 else 1
        counts = [1 if op == "Sum" else pick.randint(least, passes) for _ in range(world_size)]
        backwards = [[list(present) if everything else some() for _ in range(count)] for count in counts]
        # A gradient that a backward has brought may be combined already.
        reached = {name for rank in backwards for used in rank for name in used}
        settable = [name for name in others if name not in reached and present[name] != "sparse words"]
        sets = [[name for name in settable if pick.random() < 0.2] for _ in range(world_size)]
        clear = pick.choice(["none", "none", "none", "zero", "keep"])
        # Without a step, `zero_grad` or a backward, a rank does not see that a new step has begun.
        if program.steps and program.steps[-1].way == "leave out" and not all(backwards) and clear == "keep":
            clear = "none"
        program.steps.append(
            Step(
                changes,
                clear,
                backwards,
                sets,
                pick.choice(["step", "step", "step", "synchronize", "closure", "leave out"]),
            )
        )
    if pick.random() < 0.4:
        program.uneven = [pick.randint(0, 3) for _ in range(world_size)]
    return program


class _Replica:
    """A model and its optimizer, before they are distributed."""

    def __init__(self, program: Program) -> None:
        self.net = make_net(program.blocks, program.frozen)
        self.optimizer: Any = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=program.momentum)

    def change(self, verb: str, name: str, kind: str = "") -> None:
        if verb == "add":
            self.net.blocks[name] = make_block(kind, name)
            self.optimizer.add_param_group({"params": list(self.net.blocks[name].parameters())})
        else:
            self.net.blocks[name].requires_grad_(verb == "unfreeze")

    def clear(self, how: str) -> None:
        if how != "keep":
            self.optimizer.zero_grad(set_to_none=how == "none")

    def backwards(self, number: int, step: Step, rank: int) -> None:
        for index, used in enumerate(step.backwards[rank]):
            x = inputs_of(number, rank, f"backward {index}").requires_grad_()
            loss_of(self.net(x, used), rank).backward()  # type: ignore[no-untyped-call]
        for name in step.sets[rank]:
            for parameter in self.net.blocks[name].parameters():
                if parameter.requires_grad and not (parameter.grad is not None and parameter.grad.is_sparse):
                    parameter.grad = torch.empty_like(parameter)
                    set_values([parameter.grad], f"set {number} {rank} {name}")

    def backward(self, number: int, rank: int) -> None:
        """Run a backward that reaches all blocks."""
        x = inputs_of(number, rank, "uneven").requires_grad_()
        loss_of(self.net(x, list(self.net.blocks)), rank).backward()  # type: ignore[no-untyped-call]

    def clip(self) -> None:
        for parameter in self.net.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 0.5


def play(program: Program) -> None:
    """Play a program on every rank of `hvd`'s world, and compare each step with one process alone.

    Raises:
        AssertionError: gradients or parameters differ from those of one process alone, or between the ranks.
    """
    rank, size = hvd.rank(), hvd.size()
    mine = _Replica(program)
    mine.optimizer = hvd.DistributedOptimizer(mine.optimizer, mine.net.named_parameters(), **program.options)
    alone = [_Replica(program) for _ in range(size)]
    for number, step in enumerate(program.steps):
        where = f"step {number}, rank {rank}: {step}\n{program}\n"
        for player in (mine, *alone):
            for change in step.changes:
                player.change(*change)
            player.clear(step.clear)
        for other, player in enumerate(alone):
            player.backwards(number, step, other)
        _combine(alone, program)
        if step.way == "synchronize":
            mine.backwards(number, step, rank)
            mine.optimizer.synchronize()
            for player in (mine, *alone):
                player.clip()
            with mine.optimizer.skip_synchronize():
                mine.optimizer.step()
        elif step.way == "closure":
            mine.optimizer.step(lambda number=number, step=step: mine.backwards(number, step, rank))
        elif step.way == "step":
            mine.backwards(number, step, rank)
            mine.optimizer.step()
        else:
            mine.backwards(number, step, rank)
            mine.optimizer.synchronize()
        if step.way != "leave out":
            for player in alone:
                player.optimizer.step()
        compare(where + "gradients", dense_gradients(mine.net), dense_gradients(alone[0].net))
        compare(where + "parameters", dict(mine.net.named_parameters()), dict(alone[0].net.named_parameters()))
        tensors = [*mine.net.parameters(), *dense_gradients(mine.net).values()]
        assert_equal_on_all_ranks(where, hvd.global_process_set.group(), tensors)
    if program.uneven is not None:
        _play_unevenly(program, mine, alone)


def _play_unevenly(program: Program, mine: _Replica, alone: list[_Replica]) -> None:
    """Make as many steps as each rank has. A rank that has joined adds zeros."""
    assert program.uneven is not None
    for number in range(max(program.uneven)):
        for rank, replica in enumerate(alone):
            replica.optimizer.zero_grad()
            if number < program.uneven[rank]:
                replica.backward(number, rank)
        _combine(alone, program)
        for replica in alone:
            replica.optimizer.step()
        if number < program.uneven[hvd.rank()]:
            mine.optimizer.zero_grad()
            mine.backward(number, hvd.rank())
            mine.optimizer.step()
            where = f"step {number} of uneven ones, rank {hvd.rank()}: {program}\n"
            compare(where + "gradients", dense_gradients(mine.net), dense_gradients(alone[0].net))
            compare(where + "parameters", dict(mine.net.named_parameters()), dict(alone[0].net.named_parameters()))
    assert program.uneven[hvd.join()] == max(program.uneven)


def _combine(replicas: list[_Replica], program: Program) -> None:
    """Give all replicas the sums or the averages of their gradients. A gradient that is missing counts as zeros."""
    if len(replicas) == 1:  # an optimizer with one rank leaves missing gradients out
        return
    for parameters in zip(*[replica.net.parameters() for replica in replicas], strict=True):
        present = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not present and not parameters[0].requires_grad:
            continue
        total = torch.zeros_like(parameters[0])
        for gradient in present:
            total = total + gradient
        if program.options["op"] is hvd.Average:
            total = total / len(replicas)
        for parameter in parameters:
            parameter.grad = copy.deepcopy(total.detach())
