"""Used in place of Python: `preloaded_client.py HOW SOCKET ARGUMENTS`. See `preloaded.py`; this file loads nothing.

HOW is "alone" or "launched". MPICH's launcher talks to a rank through an inherited socket, which can be passed on. Under any
other launcher this process becomes Python itself.
"""

import json
import os
import resource
import signal
import socket
import sys

SENT_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Let the server run the program, and end with its status."""
    how, path, *words = sys.argv[1:]
    numbers = [0, 1, 2]
    if "PMI_FD" in os.environ:
        numbers.append(int(os.environ["PMI_FD"]))
    elif how == "launched":  # this launcher may expect the very process that it started
        os.execv(sys.executable, [sys.executable, *words])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        server.connect(path)
        job = {"words": words, "environ": dict(os.environ), "cwd": os.getcwd(), "numbers": numbers}
        signal.pthread_sigmask(signal.SIG_BLOCK, SENT_ON)  # a signal must follow the program, and may come as soon as that runs
        for number in SENT_ON:
            signal.signal(number, lambda number, _: send_on(server, number))
        socket.send_fds(server, [json.dumps(job).encode()], numbers)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SENT_ON)
        for number in numbers:
            os.close(number)  # as the program may
        status = int(server.recv(64) or -signal.SIGKILL)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status in SENT_ON:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def send_on(server: socket.socket, number: int) -> None:
    try:
        server.send(str(number).encode())
    except OSError:
        pass  # the program has ended, and the server or this process has closed the connection


if __name__ == "__main__":
    main()
