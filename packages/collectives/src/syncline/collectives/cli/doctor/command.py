"""The command `doctor`: connect as a training script would, gather what every rank sees, judge it, print it on rank 0."""

from __future__ import annotations

import argparse
import os
import re

import torch

from ...api.default_group import destroy_process_group, init_process_group
from ...api.object_exchange import exchange_objects
from ...errors import SynclineError
from ...group import ProcessGroup
from ...startup.backend_choice import BackendChoice, choose_backend
from ...startup.launch import detect_launch
from ...startup.registry import what_is_missing
from ...startup.settings import load_settings
from ...transports.cuda_awareness import try_cuda_awareness
from .diagnosis import diagnose
from .finding import exit_status, in_text
from .observation import Observation, observe

HELP = "print and check what a job needs: MPI, nodes, cores, memory, GPUs, backends"

CONNECT_TIMEOUT_S = 60.0
_CUDA_TIMEOUT_S = 45.0  # ranks without a GPU wait meanwhile, for no longer than the above


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--backend", help="check this backend rather than the one that would be chosen")


def run(arguments: argparse.Namespace) -> int:
    """Every rank of the job calls it. Returns the exit status, the same on every rank."""
    choice, problem, lack = None, None, None
    ranks: list[Observation] = []
    try:
        choice = _choice(arguments.backend)
        aware = _cuda_awareness()
        group = init_process_group(choice.name, timeout=CONNECT_TIMEOUT_S)
        ranks, problem = _gather(group, aware)
        lack = group.missing_for_shrink()
    except SynclineError as error:
        problem = str(error)
    findings = diagnose(ranks or [_observe_alone()], choice, problem, lack)
    if _speaks():
        print(in_text(findings), flush=True)
    destroy_process_group()
    return exit_status(findings)


def _choice(argument: str | None) -> BackendChoice:
    return choose_backend(argument, os.environ, detect_launch(os.environ), what_is_missing, settings=load_settings(os.environ))


def _cuda_awareness() -> str | None:
    """Before connecting, so that a transfer that hangs is not taken for ranks that do not come."""
    if not torch.cuda.is_available() or what_is_missing("mpi") is not None:
        return None
    return try_cuda_awareness(timeout_s=_CUDA_TIMEOUT_S).in_words


def _gather(group: ProcessGroup, aware: str | None) -> tuple[list[Observation], str | None]:
    observation = observe(os.environ, what_is_missing("mpi"), aware, _sharing(group))
    return exchange_objects(observation, group=group), _wrong_sum(group)


def _sharing(group: ProcessGroup) -> str | None:
    if "mpi" not in re.split("[:,]", group.backend_name):
        return None
    from ...transports.mpi.node.shared_allocation import probe_shared_memory

    return probe_shared_memory()


def _wrong_sum(group: ProcessGroup) -> str | None:
    """Add numbers that differ by rank and by index; the same verdict on every rank."""
    indices = torch.arange(1000, dtype=torch.float64)
    total = indices * (group.rank + 1)
    group.all_reduce(total)
    right = torch.equal(total, indices * (group.size * (group.size + 1) // 2))
    wrong = [rank for rank, is_right in enumerate(exchange_objects(right, group=group)) if not is_right]
    return f"an all_reduce over {group.describe()} gave a wrong sum on rank(s) {wrong}" if wrong else None


def _observe_alone() -> Observation:
    """What this process sees, when the ranks could not be connected."""
    return observe(os.environ, what_is_missing("mpi"))


def _speaks() -> bool:
    """Whether this process prints: rank 0, as far as anybody can tell."""
    try:
        launch = detect_launch(os.environ)
    except SynclineError:
        return True
    return launch is None or launch.rank == 0
