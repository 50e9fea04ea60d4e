"""Python that has loaded torch already, for the jobs of tests: loading it takes each new process seconds.

`PreloadedPython` starts a server, which loads torch and does nothing else. Where a test or mpiexec would start Python, it
starts `preloaded_client.py`, which takes no time and passes on to the server what a program has: arguments, environment, folder
and files. Under mpiexec one of the files is the socket by which the rank talks to it. The server forks, and the fork runs the
program as the main module. Of Python's own options it knows `-c` and `-m`.

The fork is not a child of whoever started the client, which stands for it. A signal to the client is sent on; a client that is
killed takes its fork with it (a moment later), and the client ends as its fork did. The server has one thread and runs no
kernel, so nothing is lost in a fork. Two things differ from a Python that was started: ranks share the seed of `hash`, and
torch and numpy have read their variables of the environment.
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
    """A server, for as long as it is open.

    Args:
        folder: where its socket lies.
        modules: what it loads beside torch.
        python: the interpreter. This one's server finds the modules that this process finds; another's those of its own path.

    Attributes:
        command: stands for the interpreter under mpiexec; under a launcher other than MPICH's it is Python itself.
        alone: stands for it in a command that no launcher starts.
    """

    def __init__(self, folder: Path, modules: Sequence[str] = (), python: str = sys.executable) -> None:
        path = folder / "preloaded"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(path))
        listener.listen(64)
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        if python == sys.executable:
            environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        environ["OPENBLAS_NUM_THREADS"] = (
            "1"  # numpy's library starts its threads when it is loaded, and a fork would lose them
        )
        loaded, tell = os.pipe()
        with listener:
            self._server = subprocess.Popen(
                [python, __file__, str(listener.fileno()), str(tell), *modules],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno(), tell],
                env=environ,
            )
        os.close(tell)
        os.read(loaded, 1)  # returns when the server has loaded them, or has ended: no test's limit has to allow for it
        os.close(loaded)
        client = [python, "-I", "-S", str(CLIENT)]
        self.command, self.alone = [*client, "launched", str(path)], [*client, "alone", str(path)]

    def __enter__(self) -> PreloadedPython:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server, and all that it has forked."""
        self._server.communicate()


class _Job:
    """A client, and the fork that runs its program."""

    def __init__(self, client: socket.socket) -> None:
        self.client = client
        self.process = 0
        self.ended = -1


class _Server:
    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        self._jobs: list[_Job] = []

    def run(self) -> dict[str, Any] | None:
        """Serve until standard input is closed. In a fork: returns what it has to run."""
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
        if job not in self._jobs:
            return None  # it ended at the same moment
        message, files, _, _ = socket.recv_fds(job.client, _MESSAGE_BYTES, _FILES)
        if job.process:  # a signal's number, or nothing: the client is gone
            os.kill(job.process, int(message or signal.SIGKILL))
            if not message:
                self._selector.unregister(job.client)
            return None
        if not message:
            self._forget(job)
            return None
        program: dict[str, Any] = json.loads(message)
        if process := os.fork():
            job.process = process
            job.ended = os.pidfd_open(process)
            self._selector.register(job.ended, selectors.EVENT_READ, lambda: self._tell(job))
            for file in files:
                os.close(file)
            return None
        above = max(program["numbers"]) + 1  # where they are kept until the server's own files are closed
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
        try:
            job.client.send(str(os.waitstatus_to_exitcode(status)).encode())
        except OSError:
            pass  # it was killed
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
            if job.process:
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
    gc.freeze()  # else the collector of each fork would search, and so copy, all that torch loaded
    program = _Server(socket.socket(fileno=int(listener))).run()
    if program is not None:
        _become(program)


if __name__ == "__main__":
    main()
