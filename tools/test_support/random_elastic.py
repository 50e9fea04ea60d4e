"""Random elastic trainings: ranks are lost, connections break, newcomers come, and one process alone trains the same.

The ranks are threads. `play` compares each rank with the one process after every step. A batch has the same samples for any
number of ranks, so the losses must not change the result.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from syncline.collectives import ReduceOp, TransportError
from syncline.collectives.transports.threads import InProcessGroup, create_groups
from syncline.ddp import DistributedDataParallel, Elastic, ElasticSampler
from syncline.reducer import GradBucket

from .random_training import FEATURES, HEAD, Net, compare, dense_gradients, make_block, set_values

SAMPLES, BATCH_SIZE, EPOCHS = 27, 7, 3
BATCHES = -(-SAMPLES // BATCH_SIZE)
STEPS = EPOCHS * BATCHES
_MOST_RANKS = SAMPLES // BATCHES
KINDS = [
    "linear",
    "checkpointed",
    "words",
    "scales",
    "tied",
    "pieces",
    "convolution",
    "complex",
    "wide",
    "weight norm",
    "count",
    "teacher",
    "mode",
]
MOMENTS = ["forward", "backward", "agreement", "agreed", "applied", "between"]


class Count(torch.nn.Module):
    """Has a buffer that counts the forwards. The outputs depend on it."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(FEATURES, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.factor * x / (10 + self.count.item())


class Teacher(torch.nn.Module):
    """Has frozen parameters that each forward moves towards those of a trained layer."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = (torch.nn.Linear(FEATURES, FEATURES, dtype=torch.float64) for _ in range(2))
        self.target.requires_grad_(False)

    @torch.no_grad()
    def _move(self) -> None:
        for mine, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
            mine.mul_(0.7).add_(online, alpha=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._move()
        return self.online(x) + self.target(x)  # type: ignore[no-any-return]


class Mode(torch.nn.Module):
    """Computes other outputs in evaluation than in training."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(FEATURES, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x * (1.0 if self.training else 0.5)


_ONCE_IN_A_STEP = ("count", "teacher")  # the outputs depend on the number of forwards so far


class RowsNet(Net):
    """Adds the outputs of the blocks. A block sees all rows, or only the rows that the caller names."""

    def forward(self, x: torch.Tensor, rows: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        total = torch.zeros_like(x)
        for name, block in self.blocks.items():
            if name not in rows:
                total = torch.tanh(total + block(x))
            # A block without rows is not used, so it gets no gradient on this rank.
            elif len(rows[name]):
                total = total.index_add(0, rows[name], block(x[rows[name]]))
        return total


@dataclass
class Program:
    """What all ranks do, and what befalls them.

    Attributes:
        ranks: the number of ranks at the start.
        blocks: names and kinds of the blocks.
        options: for `DistributedDataParallel`.
        optimizer: "sgd", "momentum" or "adam".
        hook: whether a communication hook with a state averages the buckets.
        every: the optimizer steps in each step with a number n for which n + 1 is divisible by this.
        seldom: the same for a second optimizer, which has the parameters of the last block; None: there is no second one.
        clears: when gradients are cleared: "before" the elastic step, at the start of its "body", or "after" the optimizer.
        to_none: gradients are cleared to None, and not to zeros.
        splits: each step has two backwards, the first in `no_sync`. Each has half of the samples. If there are blocks of kind
            "mode", each has all samples, and these blocks change their mode for the second.
        clips: gradients are clipped.
        schedules: a scheduler changes the learning rate.
        scales: a GradScaler scales the loss.
        overflows: the steps whose loss is infinite.
        changes: for each step, what the script freezes, unfreezes, adds or sets to evaluation (verb, name and kind of a block).
        changes_in_body: these changes happen in the body of the elastic step.
        lost: for each member that is lost, the step and the moment.
        broken: members, steps and moments at which a connection breaks although nobody is lost.
        newcomers: the steps before which newcomers come.
        admit_every: for `Elastic`.
        logs: the ranks average their losses after the elastic step.
    """

    ranks: int
    blocks: dict[str, str]
    options: dict[str, Any]
    optimizer: str
    hook: bool
    every: int
    seldom: int | None
    clears: str
    to_none: bool
    splits: bool
    clips: bool
    schedules: bool
    scales: bool
    overflows: list[int] = field(default_factory=list)
    changes: dict[int, list[tuple[str, str, str]]] = field(default_factory=dict)
    changes_in_body: bool = False
    lost: dict[int, tuple[int, str]] = field(default_factory=dict)
    broken: list[tuple[int, int, str]] = field(default_factory=list)
    newcomers: list[int] = field(default_factory=list)
    admit_every: int = 1
    logs: bool = False


def draw(seed: int) -> Program:
    """Return the program that belongs to a seed."""
    pick = random.Random(seed)

    def chance(probability: float) -> bool:
        return pick.random() < probability

    graph = pick.choice(["complete", "unused", "unused", "static"])
    scales, splits = chance(0.3), graph != "static" and chance(0.3)
    kinds = list(KINDS)
    if scales:
        kinds.remove("complex")  # torch's GradScaler does not take complex gradients on the CPU
    if splits:
        # Their outputs would depend on the division: on whether a sample is in the first forward of a step.
        kinds = [kind for kind in kinds if kind not in _ONCE_IN_A_STEP]
    blocks = {HEAD: "linear", **{f"b{index}": pick.choice(kinds) for index in range(pick.randint(1, 4))}}
    options: dict[str, Any] = {
        "bucket_cap_mb": pick.choice([None, 1e-9, 200 / 2**20, 0.3]),
        "gradient_as_bucket_view": chance(0.5),
        "forward_sync_buffers": chance(0.7),
        "find_unused_parameters": graph == "unused",
        "static_graph": graph == "static",
        "skip_all_reduce_unused_params": graph == "unused" and chance(0.4),
    }
    every = 1 if scales else pick.choice([1, 1, 1, 2, 3])
    program = Program(
        ranks=pick.randint(2, 4),
        blocks=blocks,
        options=options,
        optimizer=pick.choice(["sgd", "momentum", "adam"]),
        hook=chance(0.3),
        every=every,
        seldom=pick.choice([2, 3]) if not scales and every == 1 and len(blocks) > 2 and chance(0.3) else None,
        clears=pick.choice(["before", "body", "after"]),
        to_none=chance(0.7),
        splits=splits,
        clips=chance(0.2),
        schedules=chance(0.4),
        scales=scales,
    )
    if scales and chance(0.6):
        program.overflows = sorted(pick.sample(range(1, STEPS), 2))
    if chance(0.5):
        program.admit_every = pick.choice([1, 1, 2])
        latest = STEPS - 3 * program.admit_every
        program.newcomers = sorted(pick.randint(0, latest) for _ in range(pick.randint(1, _MOST_RANKS - program.ranks)))
    members = list(range(program.ranks + len(program.newcomers)))
    has_losses = chance(0.75)
    survivor = pick.randrange(program.ranks)
    for member in members:
        if has_losses and member != survivor and chance(0.5):
            program.lost[member] = (pick.randrange(STEPS), pick.choice(MOMENTS))
    for _ in range(pick.choice([0, 0, 1, 2]) if has_losses else 0):
        program.broken.append((pick.choice(members), pick.randrange(STEPS), pick.choice(["forward", "backward", "agreement"])))
    if graph != "static" and chance(0.4):
        program.changes_in_body = chance(0.3)
        for _ in range(pick.randint(1, 3)):
            step, verb = pick.randrange(1, STEPS), pick.choice(["freeze", "unfreeze", "eval", "add"])
            # A newcomer's script does not know blocks that the others have added, and a scheduler no new group of parameters.
            # A step that is repeated does not take out what its body has added.
            if verb == "add" and (program.newcomers or program.schedules or program.changes_in_body):
                verb = "freeze"
            name = f"n{step}" if verb == "add" else pick.choice([name for name in blocks if name != HEAD])
            kind = "count" if "count" in kinds and chance(0.4) else pick.choice(kinds)
            program.changes.setdefault(step, []).append((verb, name, kind))
    # A loss that is noticed outside of a step ends the training.
    program.logs = not program.lost and not program.broken and chance(0.7)
    return program


def make_rows_net(program: Program) -> RowsNet:
    net = RowsNet()
    for name, kind in program.blocks.items():
        net.blocks[name] = _block(kind, name)
    return net


def _block(kind: str, name: str) -> torch.nn.Module:
    if kind == "count":
        return Count()
    if kind == "mode":
        return Mode()
    if kind == "teacher":
        block = Teacher()
        set_values(list(block.parameters()), name)
        return block
    return make_block(kind, name)


def data() -> torch.Tensor:
    x = torch.empty(SAMPLES, FEATURES, dtype=torch.float64)
    set_values([x], "elastic data")
    return 2.5 * x


class Script:
    """The lines of the training script that one process alone has, too.

    Args:
        program: the program.
        net: the module.
        model: what the script calls: the module, or the module under `DistributedDataParallel`.
    """

    def __init__(self, program: Program, net: RowsNet, model: torch.nn.Module) -> None:
        self.program, self.net, self.model = program, net, model
        self.data = data()
        last = list(program.blocks)[-1] if program.seldom is not None else None
        often = [p for name, block in net.blocks.items() if name != last for p in block.parameters()]
        self.optimizers = {program.every: self._optimizer(often)}
        if last is not None and program.seldom is not None:
            self.optimizers[program.seldom] = self._optimizer(list(net.blocks[last].parameters()))
        first = self.optimizers[program.every]
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(first, lambda step: 0.9**step) if program.schedules else None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4) if program.scales else None

    def _optimizer(self, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        if self.program.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=0.01, eps=0.01)
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9 if self.program.optimizer == "momentum" else 0)

    @property
    def stateful(self) -> list[Any]:
        return [each for each in (self.scheduler, self.scaler) if each is not None]

    def change(self, step: int) -> None:
        """Freeze, unfreeze or add blocks, or set them to evaluation. A repeated step calls this again."""
        for verb, name, kind in self.program.changes.get(step, []):
            if verb == "eval":
                self.net.blocks[name].eval()
            elif verb != "add":
                self.net.blocks[name].requires_grad_(verb == "unfreeze")
            elif name not in self.net.blocks:
                self.net.blocks[name] = _block(kind, name)
                self.optimizers[self.program.every].add_param_group({"params": list(self.net.blocks[name].parameters())})

    @contextmanager
    def part(self, number: int) -> Iterator[None]:
        """For the second backward of a step, change the mode of the blocks that have one. A loss leaves them changed."""
        blocks = [block for block in self.net.blocks.values() if isinstance(block, Mode)] if number else []
        for block in blocks:
            block.train(not block.training)
        yield
        for block in blocks:
            block.train(not block.training)

    def clear(self, step: int, when: str) -> None:
        """Clear the gradients if the program does it at this time."""
        for period, optimizer in self.optimizers.items():
            if when == self.program.clears and (step + (when == "after")) % period == 0:
                optimizer.zero_grad(set_to_none=self.program.to_none)

    def loss(self, step: int, indices: Sequence[int], whole: int) -> torch.Tensor:
        """Return the part of the mean over a batch of `whole` samples that some of its samples have."""
        rows = {}
        if self.program.options["find_unused_parameters"]:
            for place, (name, block) in enumerate(self.net.blocks.items()):
                if name != HEAD and not isinstance(block, Count | Teacher):
                    used = [row for row, index in enumerate(indices) if (index + step + place) % 4 == 0]
                    rows[name] = torch.tensor(used, dtype=torch.long)
        outputs = self.model(self.data[list(indices)], rows)
        loss: torch.Tensor = (outputs**2).sum() / whole
        if step in self.program.overflows:
            loss = loss * float("inf")
        return loss if self.scaler is None else self.scaler.scale(loss)

    def update(self, step: int) -> None:
        """Let those optimizers step whose turn it is."""
        for period, optimizer in self.optimizers.items():
            if (step + 1) % period:
                continue
            if self.program.clips:
                if self.scaler is not None:
                    self.scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.5)
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
                self.scaler.update()
        if self.scheduler is not None and (step + 1) % self.program.every == 0:
            self.scheduler.step()
        self.clear(step, "after")

    def state(self, step: int) -> dict[str, torch.Tensor | None]:
        """Return everything that one process alone has after a step, too."""
        named = dict(self.net.named_parameters())
        found: dict[str, torch.Tensor | None] = {f"value of {name}": p.detach().clone() for name, p in named.items()}
        if step not in self.program.overflows:
            gradients = dense_gradients(self.net).items()
            found |= {f"gradient of {name}": None if g is None else g.clone() for name, g in gradients}
        found |= {f"buffer {name}": buffer.clone() for name, buffer in self.net.named_buffers()}
        for period, optimizer in self.optimizers.items():
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            found[f"rates of optimizer {period}"] = torch.tensor(rates, dtype=torch.float64)
            for name, p in named.items():
                for key, value in optimizer.state.get(p, {}).items():
                    found[f"{key} of {name} in optimizer {period}"] = None if value is None else torch.as_tensor(value).clone()
        if self.scaler is not None:
            found["scale"] = torch.tensor(self.scaler.get_scale())
        return found


def train_alone(program: Program) -> list[dict[str, torch.Tensor | None]]:
    """Train in one process. Return the state after each step."""
    net = make_rows_net(program)
    script, sampler = Script(program, net, net), ElasticSampler(SAMPLES, BATCH_SIZE, seed=1)
    states: list[dict[str, torch.Tensor | None]] = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for indices in list(sampler):
            step = len(states)
            script.clear(step, "before")
            script.change(step)
            script.clear(step, "body")
            for number, part in enumerate(_parts(program, indices)):
                with script.part(number):
                    script.loss(step, part, len(indices)).backward()  # type: ignore[no-untyped-call]
            script.update(step)
            states.append(script.state(step))
    return states


def _parts(program: Program, indices: Sequence[int]) -> list[Sequence[int]]:
    """Return the samples of each backward of a step."""
    if not program.splits:
        return [indices]
    if "mode" in program.blocks.values():
        return [indices, indices]
    return [indices[: len(indices) // 2], indices[len(indices) // 2 :]]


# ---- the ranks ----


class _Lost(BaseException):
    """Ends the thread of a rank that is lost."""


class _Counter:
    """The state of a hook: how many buckets the hook has seen. It is the same on all ranks."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model, self.seen = model, 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def _average(state: _Counter, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    state.seen += 1
    work = state.model.join_process_group.all_reduce(bucket.buffer(), ReduceOp.AVG, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class Job:
    """All members of a training, as threads. A member is named by its number, which it keeps in all groups."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.expected = train_alone(program)
        self.groups = create_groups(program.ranks, timeout_s=60)
        self.threads = ThreadPoolExecutor(program.ranks + len(program.newcomers))
        self.lock = threading.Lock()
        self.gone: set[int] = set()  # members that are lost
        self.ends: dict[int, tuple[dict[str, torch.Tensor | None], int]] = {}
        with self.lock:  # the ranks run already while the list is made
            self.members = [self.threads.submit(self._run, number, group) for number, group in enumerate(self.groups)]

    def finish(self) -> None:
        """Wait for all members.

        Raises:
            AssertionError: a rank differs from one process alone, or from another rank.
        """
        with self.threads:
            number = 0
            while number < len(self.members):  # newcomers are added meanwhile
                self.members[number].result()
                number += 1
        assert set(range(len(self.members))) == self.gone | self.ends.keys()
        first, seen = next(iter(self.ends.values()))
        for other, its_seen in self.ends.values():
            assert its_seen == seen
            for name, value in first.items():
                assert value is None or torch.equal(value, other[name]), f"the replicas differ in {name}"  # type: ignore[arg-type]

    def call_newcomers(self, step: int, group: InProcessGroup) -> None:
        """Start the newcomers that come before a step, and wait until all of them wait to be let in, or are in."""
        called = sum(at <= step for at in self.program.newcomers)
        with self.lock:
            while len(self.members) - self.program.ranks < called:
                newcomer = self.groups[0].newcomer()
                self.members.append(self.threads.submit(self._run, len(self.members), newcomer))
        numbers = range(self.program.ranks, self.program.ranks + called)
        end_s = time.monotonic() + 30
        while sum(n in group.members or n in self.gone for n in numbers) + group.newcomers() < called:
            assert time.monotonic() < end_s
            time.sleep(0.002)

    def _run(self, number: int, group: InProcessGroup) -> None:
        member = Member(self, number, group)
        try:
            self.ends[number] = member.train()
        except _Lost:
            pass
        except BaseException:
            member.lose()  # or the others would wait
            raise


class Member:
    """One rank of the training, from its start or its coming to its end."""

    def __init__(self, job: Job, number: int, group: InProcessGroup) -> None:
        self.job, self.program, self.number = job, job.program, number
        self.net = make_rows_net(self.program)
        if number:  # only the state of the others can make these values right
            set_values(list(self.net.parameters()), f"of {number}")
        self.ddp = DistributedDataParallel(self.net, process_group=group, **self.program.options)
        self.counter = _Counter(self.ddp)
        if self.program.hook:
            self.ddp.register_comm_hook(self.counter, _average)
        self.script = Script(self.program, self.net, self.ddp)
        self.broken = [(step, moment) for member, step, moment in self.program.broken if member == number]

    @property
    def group(self) -> InProcessGroup:
        group = self.ddp.join_process_group
        assert isinstance(group, InProcessGroup)
        return group

    def lose(self) -> None:
        """Let the others see this rank as a killed process."""
        self.job.gone.add(self.number)
        self.group.lose()

    def at(self, step: int, *moments: str) -> None:
        """Lose this rank, or break its connection, if this is a moment at which the program wants it."""
        for moment in moments:
            if self.program.lost.get(self.number) == (step, moment):
                self.lose()
                raise _Lost
            if (step, moment) in self.broken:
                self.broken.remove((step, moment))
                raise TransportError("a connection breaks")

    def train(self) -> tuple[dict[str, torch.Tensor | None], int]:
        program, script, sampler = self.program, self.script, ElasticSampler(SAMPLES, BATCH_SIZE, seed=1)
        elastic = Elastic(
            self.ddp,
            list(script.optimizers.values()),
            sampler,
            stateful=script.stateful,
            silence_timeout_s=30,
            give_up_s=60,
            admit_every=program.admit_every,
        )
        for optimizer in script.optimizers.values():  # this hook runs after the one of `Elastic`, which agrees
            optimizer.register_step_pre_hook(lambda *_: self.at(elastic.applied_steps - 1, "agreed"))
        for _ in elastic.epochs(EPOCHS):
            for indices in elastic.batches(sampler):
                step = elastic.applied_steps
                self.job.call_newcomers(step, self.group)
                script.clear(step, "before")
                if not program.changes_in_body:
                    script.change(step)
                with elastic.step():
                    self._body(step, indices, sampler)
                if program.logs:
                    mine = torch.tensor(float(len(indices)))
                    self.group.all_reduce(mine)
                    assert mine in (SAMPLES // BATCHES, SAMPLES // BATCHES + 1)
                if elastic.applied_steps > step:
                    where = f"step {step}, member {self.number} of {elastic.lost_ranks}: {program}\n"
                    # Adam makes the differences of rounding larger.
                    compare(where, script.state(step), self.job.expected[step], rtol=1e-6, atol=1e-7)
                    self.at(step, "between")
        return script.state(STEPS - 1), self.counter.seen

    def _body(self, step: int, indices: Sequence[int], sampler: ElasticSampler) -> None:
        program, script = self.program, self.script
        if program.changes_in_body:
            script.change(step)
        script.clear(step, "body")
        self.at(step, "forward")
        parts = _parts(program, indices)
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            with script.part(number), nullcontext() if is_last else self.ddp.no_sync():
                loss = script.loss(step, part, len(indices)) * sampler.weight
                if is_last:
                    loss.register_hook(lambda _: self.at(step, "backward"))  # type: ignore[no-untyped-call]
                loss.backward()  # type: ignore[no-untyped-call]
        self.at(step, "agreement")
        script.update(step)
        self.at(step, "applied", "agreed")


def play(program: Program) -> None:
    """Play a program, and compare every rank with one process alone after each step.

    Raises:
        AssertionError: a rank differs from one process alone, or from another rank.
    """
    Job(program).finish()
