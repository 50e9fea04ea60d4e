"""A Python that has loaded torch already, for jobs of tests: to load torch takes seconds in each new process.

`PreloadedPython` starts a server, which loads torch and waits. Where a test or mpiexec would start Python, it starts
`preloaded_client.py`. The client starts at once, and passes its arguments, environment, folder and files to the server. Under
mpiexec one of the files is the socket between launcher and rank. The server forks, and the fork runs the program as the main
module. Of Python's own options it knows `-c` and `-m`.

The fork is no child of the process that started the client; the client stands in for it. Signals to the client are passed on.
If the client is killed, its fork is killed a moment later, and when the fork ends, the client ends with its status. The server
has one thread and runs no kernel, so a fork loses nothing. A fork differs from a newly started Python in two ways: ranks share
the seed of `hash`, and torch and numpy have already read their environment variables.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OPTIMIZERS = ("torch._dynamo",)
"""What torch's optimizers load when the first one is made. It takes more than a second."""

CLIENT = Path(__file__).with_name("preloaded_client.py")
_MESSAGE_BYTES = 1 << 20
_FILES = 8


class PreloadedPython:
    """A server, which runs as long as it is open.

    Args:
        folder: the folder of its socket.
        modules: the modules to load besides torch.
        python: the interpreter. With this interpreter, the server finds the modules that this process finds; with another,
            those on its own path.

    Attributes:
        command: used in place of the interpreter under mpiexec; under a launcher other than MPICH's it becomes Python itself.
        alone: used in place of the interpreter in a command without a launcher.
    """

    def __init__(self, folder: Path, modules: Sequence[str] = (), python: str = sys.executable) -> None:
        path = folder / "preloaded"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(path))
        listener.listen(64)
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        if python == sys.executable:
            environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's library starts its threads at load time, and a fork would lose them
        loaded, tell = os.pipe()
        with listener:
            self._server = subprocess.Popen(
                [python, __file__, str(listener.fileno()), str(tell), *modules],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno(), tell],
                env=environ,
            )
        os.close(tell)
        os.read(loaded, 1)  # returns when the server has loaded them, or has ended; so no test's time limit includes it
        os.close(loaded)
        client = [python, "-I", "-S", str(CLIENT)]
        self.command, self.alone = [*client, "launched", str(path)], [*client, "alone", str(path)]

    def __enter__(self) -> PreloadedPython:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server, and all its forks."""
        self._server.communicate()


class _Job:
    """A client, and the fork that runs its program."""

    def __init__(self, client: socket.socket) -> None:
        self.client = client
        self.process = 0
        self.ended = -1  # a pidfd, which can be read when the fork has ended; -1 if no fork runs


class _Server:
    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        self._jobs: list[_Job] = []

    def run(self) -> dict[str, Any] | None:
        """Serve until standard input is closed. In a fork: returns the program to run."""
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._end_all()
                    return None
                if (program := key.data()) is not None:
                    return program  # type: ignore[no-any-return]

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        job = _Job(client)
        self._jobs.append(job)
        self._selector.register(client, selectors.EVENT_READ, lambda: self._hear(job))

    def _hear(self, job: _Job) -> dict[str, Any] | None:
        try:
            message, files, _, _ = socket.recv_fds(job.client, _MESSAGE_BYTES, _FILES)
        except ConnectionResetError:
            message, files = b"", []  # the client was killed before it read the status
        if job.ended >= 0:  # the message is a signal's number; an empty one means that the client is gone
            os.kill(job.process, int(message or signal.SIGKILL))
            if not message:
                self._selector.unregister(job.client)
            return None
        if not message:
            self._forget(job)
            return None
        if job.process:
            return None  # a signal after the end of the program
        program: dict[str, Any] = json.loads(message)
        if process := os.fork():
            job.process = process
            job.ended = os.pidfd_open(process)
            self._selector.register(job.ended, selectors.EVENT_READ, lambda: self._tell(job))
            for file in files:
                os.close(file)
            return None
        above = max(program["numbers"]) + 1  # the files are kept above it until the server's own files are closed
        kept = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
        for file in files:
            os.close(file)
        self._close_all()
        for file, number in zip(kept, program["numbers"], strict=True):
            os.dup2(file, number)
            os.close(file)
        return program

    def _tell(self, job: _Job) -> None:
        _, status = os.waitpid(job.process, 0)
        self._selector.unregister(job.ended)
        os.close(job.ended)
        job.ended = -1
        try:
            job.client.send(str(os.waitstatus_to_exitcode(status)).encode())
        except OSError:
            pass  # the client was killed
        # Let the client close the connection. If this end were closed while signals are unread, the client would get an error
        # in place of the status.
        if job.client not in self._selector.get_map():
            self._forget(job)

    def _forget(self, job: _Job) -> None:
        if job.client in self._selector.get_map():
            self._selector.unregister(job.client)
        job.client.close()
        self._jobs.remove(job)

    def _close_all(self) -> None:
        self._selector.close()
        self._listener.close()
        for job in self._jobs:
            job.client.close()
            if job.ended >= 0:
                os.close(job.ended)

    def _end_all(self) -> None:
        for job in self._jobs:
            if job.ended >= 0:
                os.kill(job.process, signal.SIGKILL)


def _become(program: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(program["environ"])
    os.chdir(program["cwd"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through="PYTHONUNBUFFERED" in os.environ)  # type: ignore[union-attr]
    words = program["words"]
    if words[0] == "-c":
        sys.path[0] = ""
        sys.argv[:] = ["-c", *words[2:]]
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), module.__dict__)
    elif words[0] == "-m":
        sys.path[0] = program["cwd"]
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    """Serve at the socket that was passed on; a fork returns from here with its program run."""
    listener, tell, *modules = sys.argv[1:]
    for module in ("torch", *modules):
        importlib.import_module(module)
    os.close(int(tell))
    gc.freeze()  # otherwise the collector in each fork would search, and so copy, everything that torch loaded
    program = _Server(socket.socket(fileno=int(listener))).run()
    if program is not None:
        _become(program)


if __name__ == "__main__":
    main()
