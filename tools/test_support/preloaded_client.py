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
import threading

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
        # A thread waits for signals and sends them on. A signal's handler could not: while it waits for a busy server, the
        # next signal calls it again, and many signals exceed Python's depth of calls.
        signal.pthread_sigmask(signal.SIG_BLOCK, SENT_ON)
        socket.send_fds(server, [json.dumps(job).encode()], numbers)
        threading.Thread(target=send_on, args=[server], daemon=True).start()
        for number in numbers:
            os.close(number)  # as the program may
        try:
            status = int(server.recv(64) or -signal.SIGKILL)
        except ConnectionResetError:
            status = -signal.SIGKILL  # the server has ended
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status in SENT_ON:
            signal.signal(-status, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
        os.kill(os.getpid(), -status)
    os._exit(status)


def send_on(server: socket.socket) -> None:
    while True:
        number = signal.sigwait(SENT_ON)
        try:
            server.send(str(int(number)).encode())
        except OSError:
            return  # the program has ended, and the server or this process has closed the connection


if __name__ == "__main__":
    main()
