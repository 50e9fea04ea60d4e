"""The command line: `python -m syncline.collectives`, also installed as `syncline`.

Commands come from the group of entry points `syncline.commands`. Each entry point names a module or an object with

- `HELP`: a description in one line;
- `add_arguments(parser)`: adds the command's options to an `argparse.ArgumentParser`;
- `run(arguments) -> int`: runs the command, and returns the exit status. If it raises a `SynclineError`, `main` prints the
  error and returns 2.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

from .errors import SynclineError
from .health.exit_status import let_go
from .startup.uncaught_errors import say

ENTRY_POINT_GROUP = "syncline.commands"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, or list all commands, and return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["run"]:
        # `syncline run` must start a script quickly, and a search for commands in all installed packages takes too long.
        from .cli.run import command

        return command.main(words[1:])
    try:
        parser = _parser(_wanted(words))
        if not words:
            parser.print_help(sys.stderr)
            return 2
        arguments = parser.parse_args(words)
        # The terminal may lack characters, such as the lines of tables. Names of files may hold bytes that are no text.
        if isinstance(sys.stdout, io.TextIOWrapper):
            with suppress(OSError):  # the stream cannot seek any more, because another file has taken its descriptor
                sys.stdout.reconfigure(errors="backslashreplace")
        status: int = arguments.run(arguments)
        print(end="", flush=True)
    except SynclineError as error:
        say(f"syncline: {error}", sys.stderr)  # an error stream that nobody reads must not change the status
        return 2
    except BrokenPipeError:  # the process that reads standard output, such as `head`, has ended
        let_go(sys.stdout)
        return 1
    return status


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default == [] or "(default" in (action.help or ""):
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(map(str, action.default))})".replace("%", "%%")
        return super()._get_help_string(action)


def _wanted(words: Sequence[str]) -> list[str]:
    from .plugins import plugin_names

    names = plugin_names(ENTRY_POINT_GROUP)
    # If the first word names a command, load only this command, because another command may fail to load.
    return [words[0]] if words and words[0] in names else names


def _parser(names: Iterable[str]) -> argparse.ArgumentParser:
    from .plugins import load_plugin
    from .version import __version__

    parser = argparse.ArgumentParser(
        prog="syncline", description="Check and measure process groups, and see where training steps go."
    )
    parser.add_argument("--version", action="version", version=f"syncline-collectives {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name in names:
        module = load_plugin(ENTRY_POINT_GROUP, name, ("HELP", "add_arguments", "run"))
        command = commands.add_parser(name, help=module.HELP, description=module.HELP, formatter_class=_HelpFormatter)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
