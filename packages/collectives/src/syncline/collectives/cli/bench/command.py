"""The command `bench`: measure collectives on several backends, and show the results on rank 0."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch

from ...api.default_group import destroy_process_group, init_process_group
from ...api.object_exchange import broadcast_object
from ...api.placement import default_device, placement_of
from ...errors import InvalidArgumentError, SynclineError
from ...group import ProcessGroup
from ...reduce_op import BOOL, DTYPES_OF, ReduceOp
from ...startup.uncaught_errors import say
from ..options import seconds
from .kinds import CPU, KINDS
from .measure import Case, measure
from .results import (
    Measurement,
    check_suffix,
    in_json,
    in_text,
    ladder,
    parse_size,
    require_matplotlib,
    save_plot,
    size_in_words,
)
from .subjects import Subject, connect_subject, default_subjects

HELP = "measure latency and bandwidth of collectives, backends side by side"

TIMEOUT_S = 120.0
DEFAULT_SIZES = ("4", "64M")
DDP_BUCKET_BYTES = 25 * 2**20
_FLOAT8 = frozenset(getattr(torch, f"float8_{kind}") for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"))
_DTYPES = (DTYPES_OF[ReduceOp.SUM] - BOOL) | _FLOAT8

Judge = Callable[[Sequence[Measurement]], Sequence[str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--collective",
        nargs="+",
        choices=sorted(KINDS),
        metavar="NAME",
        default=["all_reduce"],
        help=f"collectives to measure: {', '.join(sorted(KINDS))}",
    )
    parser.add_argument(
        "--sizes",
        nargs=2,
        metavar=("SMALLEST", "LARGEST"),
        help="bytes of the collective's larger side (default: from 4 to 64M, and 25M, the size of a bucket of DDP)",
    )
    parser.add_argument("--factor", type=int, default=4, help="ratio between two successive sizes")
    parser.add_argument(
        "--dtypes", nargs="+", metavar="NAME", default=["float32"], help="dtypes to measure, such as float32 bfloat16"
    )
    parser.add_argument(
        "--backends",
        nargs="+",
        metavar="NAME",
        help="backends to compare, and baselines. mpi-in-window is mpi on memory that the group allocates; raw-mpi is mpi4py's "
        "blocking calls; torch-gloo is torch's own group; floor is the limit of the memory's bandwidth. Ratios compare each "
        "backend with the first one",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the tensors (default: cpu)")
    parser.add_argument("--seconds", type=seconds, default=0.3, help="seconds for each size on each backend")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures into this file (needs the extra [bench])")


def run(arguments: argparse.Namespace, judge: Judge = lambda _: []) -> int:
    """Run the bench, and return the exit status. Every rank of the job must call this function.

    Args:
        arguments: the parsed options of `add_arguments`.
        judge: takes the measurements, and returns lines of text about them. Rank 0 prints these lines below the tables, and
            writes them to the file of `--json`.
    """
    cases = _cases(arguments)
    _check_device(arguments.device)
    names = arguments.backends
    control = init_process_group(timeout=TIMEOUT_S)
    subjects: list[Subject] = []
    try:
        _check_outputs(arguments, control)
        # The smallest sizes may be equal after rounding, because each part has at least one element.
        cases = list({(case.collective, case.dtype, case.true_bytes(control.size)): case for case in cases}.values())
        device = _device(arguments.device, control)
        for name in dict.fromkeys(names or default_subjects(control)):
            subjects.append(connect_subject(name, control))
        environment = _environment(control, device)
        measurements: list[Measurement] = []
        is_done, number = False, 0
        try:
            for number, case in enumerate(cases, 1):
                if control.rank == 0:
                    _say_progress(case, number, len(cases))
                measurements += measure(case, subjects, control, arguments.seconds, device)
                # After Ctrl-C or a failure, another rank may end the job before rank 0 has written the figures.
                if control.rank == 0 and number < len(cases) and _is_file(arguments.json):
                    with suppress(OSError):  # the end of the run writes the file again, and raises the error
                        _write_json(measurements, environment, arguments.json, [_cut_short(cases, number + 1)])
            is_done = True
        finally:
            # Save the figures even after Ctrl-C or a failure, because the run may have taken hours.
            if control.rank == 0 and (is_done or measurements):
                _show(measurements, environment, arguments, judge(measurements) if is_done else [_cut_short(cases, number)])
    finally:
        for subject in subjects:
            subject.close()
        destroy_process_group()
    return 0


def _say_progress(case: Case, number: int, of: int) -> None:
    dtype = str(case.dtype).removeprefix("torch.")
    size = size_in_words(case.size_bytes)
    # On a terminal each text replaces the previous text. In a job's log each text gets its own line.
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    start, end = ("\r", "\033[K\r") if is_terminal else ("", "\n")
    say(f"{start}measuring {number} of {of}: {case.collective} {dtype} {size}", sys.stderr, end=end)


def _cut_short(cases: Sequence[Case], number: int) -> str:
    return f"cut short: {number - 1} of {len(cases)} cases were measured"


def _cases(arguments: argparse.Namespace) -> list[Case]:
    smallest, largest = map(parse_size, arguments.sizes or DEFAULT_SIZES)
    sizes = ladder(smallest, largest, arguments.factor)
    if arguments.sizes is None:
        sizes = sorted({*sizes, DDP_BUCKET_BYTES})
    dtypes = [_dtype(name) for name in dict.fromkeys(arguments.dtypes)]
    cases: list[Case] = []
    for collective in dict.fromkeys(arguments.collective):
        if collective == "barrier":
            cases.append(Case(collective, dtypes[0], sizes[0]))
        else:
            cases += [Case(collective, dtype, size) for dtype in dtypes for size in sizes]
    return cases


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if dtype not in _DTYPES:
        known = ", ".join(sorted(str(known).removeprefix("torch.") for known in _DTYPES))
        raise InvalidArgumentError(
            f"expected a dtype of numbers such as float32, bfloat16 or int64, found {name!r}; known are {known}"
        )
    return cast(torch.dtype, dtype)


def _check_device(kind: str) -> None:
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidArgumentError("--device cuda: torch sees no CUDA device here; measure with --device cpu")


def _device(kind: str, control: ProcessGroup) -> torch.device:
    """Return the device of the tensors. For "cuda", each rank gets its own GPU, and the call is a collective."""
    if kind == "cpu":
        return CPU
    device = default_device(control)
    torch.cuda.set_device(device)
    return device


def _check_outputs(arguments: argparse.Namespace, control: ProcessGroup) -> None:
    """Check on rank 0 that it can write the files. All ranks call this function. If rank 0 cannot, all raise the same error."""
    problem = None
    # Only rank 0 writes, and other hosts may lack the folder.
    if control.rank == 0:
        try:
            _check_files(arguments)
        except SynclineError as error:
            problem = error
    problem = broadcast_object(problem, 0, group=control)
    if problem is not None:
        raise problem


def _check_files(arguments: argparse.Namespace) -> None:
    for path in filter(None, (arguments.json, arguments.plot)):
        folder = path.resolve().parent
        # The methods of Path raise a PermissionError in a closed folder; these functions do not.
        if not os.path.isdir(folder):
            raise InvalidArgumentError(f"cannot write {path}: there is no folder {folder}")
        if os.path.isdir(path):
            raise InvalidArgumentError(f"cannot write {path}: it is a folder")
        if not os.access(path if os.path.exists(path) else folder, os.W_OK):
            raise InvalidArgumentError(f"cannot write {path}: this user may not write there, or the file system is read-only")
    if arguments.plot is not None:
        require_matplotlib()
        check_suffix(arguments.plot)


def _environment(control: ProcessGroup, device: torch.device) -> dict[str, Any]:
    placement = placement_of(control)
    return {
        "syncline": version("syncline-collectives"),
        "torch": torch.__version__,
        "control": control.describe(),
        "world_size": control.size,
        "nodes": placement.nodes,
        "threads": torch.get_num_threads(),
        "device": device.type,
    }


def _show(
    measurements: list[Measurement], environment: dict[str, Any], arguments: argparse.Namespace, verdicts: Sequence[str]
) -> None:
    try:
        _write(measurements, environment, arguments, verdicts)
    # Print the figures even if a file cannot be written. Write the file first, because printing fails if the reader of the
    # output has ended.
    finally:
        _print(measurements, environment, verdicts)


def _print(measurements: list[Measurement], environment: dict[str, Any], verdicts: Sequence[str]) -> None:
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    print("seconds per call on the slowest rank; size and bandwidths as nccl-tests define them\n")
    print(in_text(measurements))
    refused = {f"{row.backend}: {row.collective} of {row.dtype}: {row.note}" for row in measurements if not row.samples_s}
    print("".join(f"\nnot measured: {line}" for line in sorted(refused)), end="")
    print("".join(f"\n{line}" for line in verdicts), flush=True)


def _write(
    measurements: list[Measurement], environment: dict[str, Any], arguments: argparse.Namespace, verdicts: Sequence[str]
) -> None:
    try:
        path = arguments.json
        if path is not None:
            _write_json(measurements, environment, path, verdicts)
        path = arguments.plot
        if path is not None:
            save_plot(measurements, str(path))
    except OSError as error:
        raise InvalidArgumentError(f"cannot write {path}: {error.strerror}") from error


def _write_json(measurements: list[Measurement], environment: dict[str, Any], path: Path, verdicts: Sequence[str]) -> None:
    figures = {**in_json(measurements, environment), **({"verdicts": list(verdicts)} if verdicts else {})}
    path.write_text(json.dumps(figures, indent=1) + "\n")


def _is_file(path: Path | None) -> bool:
    """Whether each write replaces what was written there before. A pipe would show all of it."""
    return path is not None and (path.is_file() or not path.exists())
