"""The command line: `python -m syncline.collectives`, also installed as `syncline`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .bench import command as bench
from .doctor import command as doctor
from .errors import SynclineError
from .failures import command as report
from .version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; under mpirun every rank does. Returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except SynclineError as error:
        print(f"syncline: {error}", file=sys.stderr)
        return 2
    return status


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default once, and none where there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or "(default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="syncline", description="Check and measure process groups. Start it with mpirun or alone."
    )
    parser.add_argument("--version", action="version", version=f"syncline-collectives {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, module, help_text in (
        ("doctor", doctor, "print and check what a job needs: MPI, nodes, cores, memory, GPUs, backends"),
        ("bench", bench, "measure latency and bandwidth of collectives, backends side by side"),
        ("report", report, "merge what the ranks wrote when a job failed: what each was in, who is behind, where they part"),
    ):
        command = commands.add_parser(name, help=help_text, description=help_text, formatter_class=_HelpFormatter)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
