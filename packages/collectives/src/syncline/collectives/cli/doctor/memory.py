"""The doctor's findings about memory: whether ranks share it, and how much is free. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from ...startup.library_check import LEAST_SHM_BYTES
from ...startup.nodes import place
from ...transports.shared_memory.memory_limit import room_for_each
from .finding import Finding, Status, ok, worst
from .observation import Observation

# A few buckets of 25 MiB are in use at a time, for input and output. With less memory a model's gradients do not fit.
LEAST_BYTES = 128 * 2**20

_MORE = "give the job more memory (Slurm's --mem or --mem-per-cpu, a container's --memory)"


def memory(ranks: Sequence[Observation]) -> list[Finding]:
    """Judge whether ranks can share memory, how much is left, and /dev/shm, which the MPI library uses."""
    return [_sharing(ranks[0].sharing), _left(ranks), _dev_shm(ranks)]


def _sharing(result: str | None) -> Finding:
    """Judge the trial of shared memory, which has the same result on every rank."""
    name = "shared memory"
    if result is None:
        return ok(name, "not tried: the ranks are not connected by MPI")
    if not result.startswith("no:"):
        return ok(name, result)
    remedy = f"gradients travel by plain MPI, which is slower: start the ranks of a node in one container, or {_MORE}"
    return Finding(name, Status.WARN, result, remedy)


def _left(ranks: Sequence[Observation]) -> Finding:
    placement = place(0, [rank.host for rank in ranks])
    members = (placement.ranks_on_node(node) for node in range(placement.nodes))
    return worst([_left_on([ranks[rank] for rank in node]) for node in members])


def _left_on(ranks: Sequence[Observation]) -> Finding:
    """Judge how much memory is left on a node, if all its ranks use the same amount."""
    room = room_for_each([rank.memory_limits for rank in ranks])
    if room is None:
        return ok("memory", "this system does not say how much is left")
    found = (
        f"{in_bytes(room.each_bytes)} left for each of {len(ranks)} rank(s) on {ranks[0].host.hostname}, by {room.limit.name}"
    )
    if room.each_bytes >= LEAST_BYTES:
        return ok("memory", found)
    return Finding("memory", Status.WARN, found, f"have {in_bytes(LEAST_BYTES)} or more for the buckets of gradients: {_MORE}")


def _dev_shm(ranks: Sequence[Observation]) -> Finding:
    """Judge /dev/shm. MPI libraries put shared memory there; Syncline does not."""
    least = min(ranks, key=lambda rank: rank.shm_free_bytes)
    found = (
        f"{in_bytes(least.shm_total_bytes)}, {in_bytes(least.shm_free_bytes)} free on {least.host.hostname} (MPI libraries use "
        "it, Syncline does not)"
    )
    if least.shm_total_bytes >= LEAST_SHM_BYTES or not least.launch_is_mpi or least.launch_world_size == 1:
        return ok("/dev/shm", found)
    remedy = (
        f"with less than {in_bytes(LEAST_SHM_BYTES)} MPICH may crash while it starts: give the container more, such as "
        "`docker run --shm-size=1g`"
    )
    return Finding("/dev/shm", Status.WRONG if least.mpi is None else Status.WARN, found, remedy)


def in_bytes(size: int) -> str:
    """Format a size in MiB or GiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
