"""Random training programs. The ranks of a group train, and one process alone computes what they should get.

`play` compares the results after every step. One process alone computes the gradients of the mean of the ranks' losses, so it
needs no communication, and knows nothing of buckets.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from syncline.collectives import ProcessGroup, exchange_objects
from syncline.collectives.internal import bytes_of
from syncline.ddp import DistributedDataParallel
from syncline.reducer import GradBucket

STEPS = 7
FEATURES = 6
_ROWS = 3
_WORDS = 11
_WIDE = (256 << 10) // (8 * FEATURES) + 5  # the weight's gradient is large enough to become a part of its bucket's memory
_RTOL, _ATOL = 1e-7, 1e-9
HEAD = "head"  # the block that every forward uses, because a backward must reach a parameter on every rank


# ---- the model: blocks that map (rows, FEATURES) to (rows, FEATURES) ----


class Checkpointed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(FEATURES, 4), torch.nn.Tanh(), torch.nn.Linear(4, FEATURES))

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


class Reentrant(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(FEATURES, FEATURES), torch.nn.Tanh())

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x if x.requires_grad else x.detach().requires_grad_(), use_reentrant=True)


class Words(torch.nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(_WORDS, FEATURES, sparse=sparse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((x[:, :2].abs() * 7).long() % _WORDS).mean(1)  # type: ignore[no-any-return]


class Scales(torch.nn.Module):
    """Has parameters of no dimension and of no element, and one whose gradient is expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.empty = torch.nn.Parameter(torch.ones(())), torch.nn.Parameter(torch.ones(0))
        self.shift = torch.nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + self.empty.sum() + self.shift.sum()


class Tied(torch.nn.Module):
    """Has one weight in two layers, one of which runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(FEATURES, FEATURES), torch.nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(torch.tanh(self.first(torch.tanh(self.first(x)))))


class Pieces(torch.nn.Module):
    """Has parameters whose gradients are pieces of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(2)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.cat(list(self.pieces))


class Convolution(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Conv2d(2, 2, (1, 3), padding=(0, 1)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.view(-1, 2, 1, 3)).reshape(-1, FEATURES)  # type: ignore[no-any-return]


class Complex(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(FEATURES, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.factor * self.factor.conj().exp()).real


class Counters(torch.nn.Module):
    """Has a buffer that forward changes in place, and one that forward replaces. The outputs depend on both."""

    count: torch.Tensor
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(FEATURES))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.factor * (x - self.mean) / (10 + self.count.item())


def _wide() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, _WIDE), torch.nn.Tanh(), torch.nn.Linear(_WIDE, FEATURES, bias=False))


BLOCKS: dict[str, Callable[[], torch.nn.Module]] = {
    "linear": lambda: torch.nn.Linear(FEATURES, FEATURES),
    "batch norm": lambda: torch.nn.BatchNorm1d(FEATURES),
    "checkpointed": Checkpointed,
    "words": lambda: Words(sparse=False),
    "sparse words": lambda: Words(sparse=True),
    "scales": Scales,
    "tied": Tied,
    "pieces": Pieces,
    "convolution": Convolution,
    "complex": Complex,
    "counters": Counters,
    "wide": _wide,
    "re-entrant": Reentrant,
    "weight norm": lambda: parametrizations.weight_norm(torch.nn.Linear(FEATURES, FEATURES)),
}


class Net(torch.nn.Module):
    """Adds the outputs of the blocks that a call uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleDict()

    def forward(self, x: torch.Tensor, used: Sequence[str] = (), *, fails: bool = False) -> torch.Tensor:
        total = torch.zeros_like(x)
        for name, block in self.blocks.items():
            if name in used:
                total = torch.tanh(total + block(x))
            if fails:
                raise _Planned
        return total


class _Planned(Exception):
    """The program wants this failure."""


def set_values(tensors: Sequence[torch.Tensor], seed: str) -> None:
    """Give tensors random values. Ranks may be threads, which share torch's own generator, so make one."""
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:6], "big"))
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(0.4 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))


def make_block(kind: str, seed: str) -> torch.nn.Module:
    block = BLOCKS[kind]()
    for tensor in [*block.parameters(), *block.buffers()]:
        if tensor.dtype == torch.float32:
            tensor.data = tensor.data.double()
    set_values(list(block.parameters()), seed)
    return block


def make_net(blocks: Mapping[str, str], frozen: Iterable[str], noise: str = "") -> Net:
    """Make a net of blocks with these names and kinds. `noise` makes its values other ones."""
    net = Net()
    for name, kind in blocks.items():
        net.blocks[name] = make_block(kind, f"{name}{noise}")
    for name in frozen:
        net.blocks[name].requires_grad_(False)
    return net


# ---- a program ----


@dataclass
class Step:
    """What all ranks do in a step.

    Attributes:
        changes: the changes of the model before the step: a verb and its arguments, see `_change`.
        clear: what happens to gradients before the step: "none" sets them to None, "zero" to zeros, "keep" leaves them.
        local: for each rank, the blocks that each of its forwards in `no_sync` uses.
        used: for each rank, the blocks that its other forwards use.
        way: how these forwards and backwards go, see `_reduced_losses` and `Player.step`.
        fails: a forward raises an error before the reduced forward.
        fails_in_backward: a backward raises an error before the first gradient.
        is_looked_at: a backward of the bare module runs in `no_sync`, and its gradients are dropped.
        runs_frozen: a forward runs while all parameters are frozen, before all other forwards.
        validates: all ranks run the model in evaluation mode after the step.
        clips: gradients are clipped before the optimizer's step.
    """

    changes: list[tuple[str, ...]]
    clear: str
    local: list[list[list[str]]]
    used: list[list[str]]
    way: str
    fails: bool
    fails_in_backward: bool
    is_looked_at: bool
    runs_frozen: bool
    validates: bool
    clips: bool


@dataclass
class Program:
    """A random program for some ranks.

    Attributes:
        blocks: names and kinds of the first blocks.
        frozen: the blocks that need no gradient at first.
        options: for `DistributedDataParallel`.
        optimizer: "sgd", "momentum" or "adam".
        hook: whether a communication hook reduces the buckets.
        steps: the steps.
        uneven: for each rank, the number of its inputs in a loop in `join` after the steps; None: there is no such loop.
        uneven_ways: what each iteration of this loop does: "trains", "local" (a backward in `no_sync` whose gradients are
            dropped), "frozen" (a forward while all parameters are frozen) or "no_grad" (a forward without gradients).
        used_last: the blocks that the forwards in this loop use.
    """

    blocks: dict[str, str]
    frozen: list[str]
    options: dict[str, Any]
    optimizer: str
    hook: bool
    steps: list[Step] = field(default_factory=list)
    uneven: list[int] | None = None
    uneven_ways: list[str] = field(default_factory=list)
    used_last: list[str] = field(default_factory=list)


def draw(seed: int, world_size: int) -> Program:
    """Return the program that belongs to a seed. It is valid: every rank may run it under `DistributedDataParallel`."""
    pick = random.Random(f"{seed} {world_size}")
    graph = pick.choice(["complete", "complete", "unused", "unused", "static"])
    # A static graph has no sparse gradients, and only a static graph allows re-entrant checkpoints.
    kinds = [kind for kind in BLOCKS if kind != ("sparse words" if graph == "static" else "re-entrant")]
    blocks = {HEAD: "linear", **{f"b{index}": pick.choice(kinds) for index in range(pick.randint(1, 5))}}
    optimizer = pick.choice(["sgd", "momentum", "adam"])
    if optimizer != "sgd" or pick.random() < 0.8:
        blocks = {name: "words" if kind == "sparse words" else kind for name, kind in blocks.items()}
    options: dict[str, Any] = {
        "bucket_cap_mb": pick.choice([None, 1e-9, 100 / 2**20, 400 / 2**20, 0.3]),
        "gradient_as_bucket_view": pick.random() < 0.5,
        "forward_sync_buffers": pick.random() < 0.7,
        "find_unused_parameters": graph == "unused",
        "static_graph": graph == "static",
        "skip_all_reduce_unused_params": graph == "unused" and pick.random() < 0.4,
    }
    if "sparse words" in blocks.values():
        options["gradient_as_bucket_view"] = False
    program = Program(blocks, [], options, optimizer, pick.random() < 0.3)
    names = [name for name in blocks if name != HEAD]
    program.frozen = [name for name in names if pick.random() < 0.15]
    present, frozen = dict(blocks), set(program.frozen)
    fixed = [name for name in present if name == HEAD or pick.random() < 0.7]
    clears = ["none", "none", "none", "zero", "keep"]
    for number in range(STEPS):
        changes: list[tuple[str, ...]] = []
        if graph != "static" and number and pick.random() < 0.5:
            changes = _draw_changes(pick, number, present, frozen)

        def some(present: dict[str, str] = present) -> list[str]:
            return [name for name in present if name == HEAD or pick.random() < 0.6]

        if graph == "static":
            used = [fixed] * world_size
            local = [[fixed] * (pick.randint(1, 2) if number and pick.random() < 0.2 else 0)] * world_size
        else:
            used = [some() if graph == "unused" else list(present) for _ in range(world_size)]
            local = [[some() for _ in range(pick.choice([0, 0, 1, 2]))] for _ in range(world_size)]
            if pick.random() < 0.6:
                local = [[] for _ in range(world_size)]
        ways = ["plain", "plain", "plain", "saliency"]
        if graph != "static":
            ways += ["two forwards", "two backwards", "retained", "penalty"]
        program.steps.append(
            Step(
                changes,
                pick.choice(clears),
                local,
                used,
                pick.choice(ways),
                fails=pick.random() < 0.1,
                fails_in_backward=pick.random() < 0.1,
                is_looked_at=pick.random() < 0.1 and not changes,  # the bare module does not follow a change
                # A frozen forward does not follow a change, so what it writes to new buffers is overwritten from rank 0 later.
                runs_frozen=pick.random() < 0.1 and (options["forward_sync_buffers"] or not any("add" in c for c in changes)),
                validates=pick.random() < 0.3,
                clips=pick.random() < 0.2 and "sparse words" not in present.values(),
            )
        )
    if pick.random() < 0.3:
        program.uneven = [pick.randint(0, 3) for _ in range(world_size)]
        program.uneven_ways = [pick.choice(["trains", "trains", "trains", "local", "frozen", "no_grad"]) for _ in range(3)]
    program.used_last = fixed if graph == "static" else list(present)
    return program


def _draw_changes(pick: random.Random, number: int, present: dict[str, str], frozen: set[str]) -> list[tuple[str, ...]]:
    """Draw changes of the model, and make them in the dictionary of blocks and the set of frozen blocks."""
    changes: list[tuple[str, ...]] = []
    for _ in range(pick.choice([1, 1, 2])):
        others = [name for name in present if name != HEAD]
        verb = pick.choice(
            ["freeze", "unfreeze", "add", "remove", "replace", "assign", "load", "swap data", "wrap again", "hook"]
        )
        if verb == "add":
            name, kind = (
                f"n{number}.{len(changes)}".replace(".", "_"),
                pick.choice([k for k in BLOCKS if k not in ("sparse words", "re-entrant")]),
            )
            present[name] = kind
            changes.append((verb, name, kind))
        elif verb in ("wrap again", "assign", "load"):
            changes.append((verb, str(number)))
        elif others:
            name = pick.choice(others)
            if verb == "freeze":
                frozen.add(name)
            elif verb == "unfreeze":
                frozen.discard(name)
            elif verb == "remove":
                del present[name]
                frozen.discard(name)
            changes.append((verb, name, str(number)))
    return changes


# ---- playing it ----


class Player:
    """Plays a program: what ranks and one process alone have in common."""

    def __init__(self, program: Program, noise: str = "") -> None:
        """`noise` makes the values of this player's new parameters its own, so that only a broadcast makes them equal."""
        self.program, self.noise = program, noise
        self.net = make_net(program.blocks, program.frozen, noise)
        self.make_optimizer()

    def make_optimizer(self) -> None:
        parameters = list(self.net.parameters())
        if self.program.optimizer == "adam":
            self.optimizer: torch.optim.Optimizer = torch.optim.Adam(
                parameters, lr=0.01, eps=0.01
            )  # so that rounding stays small
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9 if self.program.optimizer == "momentum" else 0)

    def change(self, verb: str, *rest: str) -> None:
        """Change the model."""
        name, blocks = rest[0], self.net.blocks
        if verb == "add":
            blocks[name] = make_block(rest[1], f"{name}{self.noise}")
        elif verb == "remove":
            del blocks[name]
        elif verb in ("freeze", "unfreeze"):
            blocks[name].requires_grad_(verb == "unfreeze")
        elif verb == "replace":
            for module in blocks[name].modules():
                for key, parameter in list(module._parameters.items()):
                    if parameter is not None:
                        new = torch.nn.Parameter(torch.empty_like(parameter), requires_grad=parameter.requires_grad)
                        set_values([new], f"{key}{rest[1]}{self.noise}")
                        setattr(module, key, new)
        elif verb == "hook":
            for parameter in blocks[name].parameters():
                if parameter.requires_grad:
                    parameter.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
        elif verb == "swap data":
            for parameter in blocks[name].parameters():
                parameter.data = parameter.data.clone()
        elif verb in ("assign", "load"):
            # These values are equal on all ranks, like those of a file.
            state = {key: value.detach().clone() for key, value in self.net.named_parameters(remove_duplicate=False)}
            set_values([value for key, value in state.items() if key.startswith(f"blocks.{HEAD}.")], f"file {name}")
            self.net.load_state_dict(state, strict=False, assign=verb == "assign")
        if verb in ("add", "remove", "replace", "assign"):
            self.make_optimizer()

    def clear(self, how: str) -> None:
        if how == "none":
            self.optimizer.zero_grad()
            for parameter in self.net.parameters():
                parameter.grad = None
        elif how == "zero":
            self.optimizer.zero_grad(set_to_none=False)

    @contextmanager
    def _with_way(self, way: str) -> Iterator[None]:
        """Freeze all parameters, or compute without gradients, if this is the way of the iteration."""
        trained = [parameter for parameter in self.net.parameters() if parameter.requires_grad]
        if way == "frozen":
            self.net.requires_grad_(False)
        with torch.set_grad_enabled(way != "no_grad"):
            yield
        for parameter in trained:
            parameter.requires_grad_(True)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return dense_gradients(self.net)

    def update(self, step: Step) -> None:
        if step.clips:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        self.optimizer.step()


def dense_gradients(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad
        for name, p in module.named_parameters()
    }


def inputs_of(number: int, rank: int, forward: str) -> torch.Tensor:
    x = torch.empty(_ROWS, FEATURES, dtype=torch.float64)
    set_values([x], f"{number} {rank} {forward}")
    return 2.5 * x


def loss_of(outputs: torch.Tensor, rank: int) -> torch.Tensor:
    return ((outputs - 0.3 * rank) ** 2).mean() * (1 + rank)


class Rank(Player):
    """A rank of the group."""

    def __init__(self, program: Program, group: ProcessGroup) -> None:
        super().__init__(program, f" of rank {group.rank}" if group.rank else "")
        self.group = group
        self.wrap()

    def wrap(self) -> None:
        self.ddp = DistributedDataParallel(self.net, process_group=self.group, **self.program.options)
        if self.program.hook:
            self.ddp.register_comm_hook(None, self._hook)

    def _hook(self, _: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        reduced = self.group.all_reduce(bucket.buffer().div_(self.group.size), async_op=True)
        return reduced.get_future().then(lambda done: done.value()[0])

    def change(self, verb: str, *rest: str) -> None:
        super().change(verb, *rest)
        if verb == "wrap again":
            self.wrap()

    def step(self, number: int, step: Step) -> torch.Tensor | None:
        """Compute the gradients of a step."""
        rank = self.group.rank
        if step.runs_frozen:
            with self._with_way("frozen"):
                self.ddp(inputs_of(number, rank, "frozen"), step.used[rank])
        if step.is_looked_at:
            kept = {id(parameter): parameter.grad for parameter in self.net.parameters()}
            for parameter in self.net.parameters():
                parameter.grad = None
            with self.ddp.no_sync():
                loss_of(self.net(inputs_of(number, rank, "looked at"), step.used[rank]), rank).backward()  # type: ignore[no-untyped-call]
            for parameter in self.net.parameters():
                parameter.grad = kept[id(parameter)]
        for index, used in enumerate(step.local[rank]):
            with self.ddp.no_sync():
                outputs = self.ddp(inputs_of(number, rank, f"local {index}"), used)
            loss_of(outputs, rank).backward()  # type: ignore[no-untyped-call]
        if step.fails:
            try:
                self.ddp(inputs_of(number, rank, "fails"), [HEAD], fails=True)
            except _Planned:
                pass
        used = step.used[rank]
        if step.fails_in_backward:
            outputs = self.ddp(inputs_of(number, rank, "fails in backward"), used)
            outputs.register_hook(_fail)
            try:
                loss_of(outputs, rank).backward()  # type: ignore[no-untyped-call]
            except _Planned:
                pass
        if step.way in ("two forwards", "two backwards"):
            losses = [loss_of(self.ddp(inputs_of(number, rank, part), used), rank) for part in ("first", "second")]
            if step.way == "two forwards":
                losses = [torch.stack(losses).sum()]
            for loss in losses:
                loss.backward()  # type: ignore[no-untyped-call]
            return None
        x = inputs_of(number, rank, "first").requires_grad_(step.way == "penalty")
        loss = loss_of(self.ddp(x, used), rank)
        if step.way == "penalty":
            loss = loss + _penalty(loss, x)
        elif step.way == "saliency":
            torch.autograd.grad(loss, list(self.net.blocks[HEAD].parameters()), retain_graph=True)
        elif step.way == "retained":
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        loss.backward()  # type: ignore[no-untyped-call]
        return None

    def train_unevenly(self, counts: Sequence[int]) -> None:
        """Train in `join` on as many inputs as each rank has. Then compute the gradients of one more input of each rank."""
        with self.ddp.join():
            for number in range(counts[self.group.rank]):
                self._iterate(number, self.program.uneven_ways[number])
        # The optimizers of ranks that left early have taken fewer steps, so do not step here.
        self._iterate(len(self.program.uneven_ways), "only gradients")

    def _iterate(self, number: int, way: str) -> None:
        self.optimizer.zero_grad()
        with self._with_way(way), self.ddp.no_sync() if way == "local" else nullcontext():
            outputs = self.ddp(inputs_of(number, self.group.rank, "uneven"), self.program.used_last)
            if way in ("trains", "local", "only gradients"):
                loss_of(outputs, self.group.rank).backward()  # type: ignore[no-untyped-call]
        if way == "trains":
            self.optimizer.step()

    def validate(self, number: int) -> torch.Tensor:
        self.ddp.eval()
        with torch.no_grad():
            outputs = self.ddp(inputs_of(number, self.group.rank, "validation"), list(self.net.blocks))
        self.ddp.train()
        return outputs  # type: ignore[no-any-return]


def _fail(_: torch.Tensor) -> None:
    raise _Planned


def _penalty(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return (slope**2).sum()


class Alone(Player):
    """One process that plays all ranks in turn, with one model and the buffers of every rank."""

    def __init__(self, program: Program, world_size: int) -> None:
        super().__init__(program)
        self.world_size = world_size
        self.buffers = [self._save_buffers() for _ in range(world_size)]
        self.stale = True

    def _save_buffers(self) -> dict[str, torch.Tensor]:
        return {name: buffer.clone() for name, buffer in self.net.named_buffers()}

    def _load_buffers(self, rank: int) -> None:
        for name, buffer in self.buffers[rank].items():
            path, _, key = name.rpartition(".")
            self.net.get_submodule(path)._buffers[key] = buffer.clone()

    def share_buffers(self, *, reduces: bool, root: int = 0) -> None:
        """As at the start of a forward on all ranks."""
        if self.stale and self.program.options["forward_sync_buffers"]:
            self.buffers = [dict(self.buffers[root]) for _ in self.buffers]
        self.stale = reduces

    def forward(self, rank: int, x: torch.Tensor, used: Sequence[str]) -> torch.Tensor:
        self._load_buffers(rank)
        outputs: torch.Tensor = self.net(x, used)
        self.buffers[rank] = self._save_buffers()
        return outputs

    def change(self, verb: str, *rest: str) -> None:
        super().change(verb, *rest)
        present = self._save_buffers()
        self.buffers = [{name: old.get(name, now) for name, now in present.items()} for old in self.buffers]
        if verb == "wrap again":  # the constructor gives all ranks rank 0's buffers
            self.buffers = [dict(self.buffers[0]) for _ in self.buffers]
            self.stale = True

    def step(self, number: int, step: Step) -> None:
        """Compute the gradients of the mean of the ranks' losses."""
        ranks = range(self.world_size)
        if step.runs_frozen:
            self.share_buffers(reduces=True)
            for rank in ranks:
                self.forward(rank, inputs_of(number, rank, "frozen"), step.used[rank])
        if step.is_looked_at:
            for rank in ranks:
                self.forward(rank, inputs_of(number, rank, "looked at"), step.used[rank])
        if any(step.local):
            self.share_buffers(reduces=False)
        for rank in ranks:
            for index, used in enumerate(step.local[rank]):
                loss = loss_of(self.forward(rank, inputs_of(number, rank, f"local {index}"), used), rank)
                (loss / self.world_size).backward()  # type: ignore[no-untyped-call]
        if step.fails:
            self.share_buffers(reduces=True)
        if step.fails_in_backward:
            self.share_buffers(reduces=True)
            for rank in ranks:
                self.forward(rank, inputs_of(number, rank, "fails in backward"), step.used[rank])
        for part in ("first", "second") if step.way in ("two forwards", "two backwards") else ("first",):
            self.share_buffers(reduces=True)
            for rank in ranks:
                x = inputs_of(number, rank, part).requires_grad_(step.way == "penalty")
                loss = loss_of(self.forward(rank, x, step.used[rank]), rank)
                if step.way == "penalty":
                    loss = loss + _penalty(loss, x)
                if step.way == "retained":
                    loss = 2 * loss
                (loss / self.world_size).backward()  # type: ignore[no-untyped-call]

    def train_unevenly(self, counts: Sequence[int]) -> None:
        """Divide gradients by the number of all ranks. After the loop all ranks have the state of the last rank with inputs."""
        for number in range(max(counts)):
            present = [rank for rank, count in enumerate(counts) if count > number]
            self._iterate(number, self.program.uneven_ways[number], present, root=present[-1])
        self.stale = True
        self.share_buffers(reduces=True, root=max(rank for rank, count in enumerate(counts) if count == max(counts)))
        self._iterate(len(self.program.uneven_ways), "only gradients", range(self.world_size), root=0)

    def _iterate(self, number: int, way: str, present: Sequence[int], *, root: int) -> None:
        self.share_buffers(reduces=way not in ("local", "no_grad"), root=root)
        self.optimizer.zero_grad()
        for rank in present:
            with self._with_way(way):
                outputs = self.forward(rank, inputs_of(number, rank, "uneven"), self.program.used_last)
            if way in ("trains", "only gradients"):
                (loss_of(outputs, rank) / self.world_size).backward()  # type: ignore[no-untyped-call]
        if way == "trains":
            self.optimizer.step()

    def validate(self, number: int, rank: int) -> torch.Tensor:
        self.net.eval()
        with torch.no_grad():
            outputs = self.forward(rank, inputs_of(number, rank, "validation"), list(self.net.blocks))
        self.net.train()
        return outputs


def play(group: ProcessGroup, program: Program) -> None:
    """Play a program on every rank of a group, and compare each step with one process alone.

    Raises:
        AssertionError: a rank's gradients, parameters, buffers or outputs differ from those of one process alone, or the
            replicas differ in any bit. The text has the program and the step.
    """
    mine, alone = Rank(program, group), Alone(program, group.size)
    for number, step in enumerate(program.steps):
        where = f"step {number}, rank {group.rank}: {step}\n{program}\n"
        for player in (mine, alone):
            for change in step.changes:
                player.change(*change)
            player.clear(step.clear)
            player.step(number, step)
        compare(where + "gradients", mine.gradients(), alone.gradients())
        assert_equal_on_all_ranks(where, group, [*mine.net.parameters(), *mine.gradients().values()])
        for player in (mine, alone):
            player.update(step)
        compare(where + "parameters", dict(mine.net.named_parameters()), dict(alone.net.named_parameters()))
        compare(where + "buffers", dict(mine.net.named_buffers()), alone.buffers[group.rank])
        if step.validates:
            alone.share_buffers(reduces=False)
            for rank in range(group.size):
                outputs = alone.validate(number, rank)
                if rank == group.rank:
                    expected = outputs
            compare(where + "outputs", {"": mine.validate(number)}, {"": expected})
    if program.uneven is not None:
        for player in (mine, alone):
            player.train_unevenly(program.uneven)
        where = f"uneven inputs, rank {group.rank}: {program}\n"
        compare(where + "gradients", mine.gradients(), alone.gradients())
        compare(where + "parameters", dict(mine.net.named_parameters()), dict(alone.net.named_parameters()))
        compare(where + "buffers", dict(mine.net.named_buffers()), alone.buffers[group.rank])
        assert_equal_on_all_ranks(where, group, mine.net.parameters())


def compare(where: str, found: dict[str, Any], expected: dict[str, Any], *, rtol: float = _RTOL, atol: float = _ATOL) -> None:
    assert found.keys() == expected.keys(), where
    for name, value in expected.items():
        if value is None or found[name] is None:
            assert found[name] is value, f"{where}, '{name}': found {found[name]}, expected {value}"
        else:
            difference = partial("{}, '{}': {}".format, where, name)
            torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=difference)


def assert_equal_on_all_ranks(where: str, group: ProcessGroup, tensors: Iterable[torch.Tensor | None]) -> None:
    """Compare every bit."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(b"none" if tensor is None else bytes_of(tensor.detach().contiguous()).numpy().tobytes())
    digests = exchange_objects(digest.hexdigest(), group=group)
    assert len(set(digests)) == 1, f"{where}: the replicas differ: {digests}"
