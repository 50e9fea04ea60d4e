"""Several hosts on one machine: network namespaces joined by wires of limited rate. Linux, root, iproute2.

1. Each host is a network namespace. Two hosts are joined by a wire: a pair of virtual Ethernet devices with the same name. If
   there are more hosts, each has a wire to a switch, which is a bridge in its own namespace. A token bucket at each end of a
   wire limits the rate. 2. A program on a host also has its own host name, process ids, semaphores and /dev/shm, so that hosts
   share no memory. 3. mpiexec, MPICH's or Open MPI's, runs on the first host. It starts the ranks of other hosts through an
   agent, as through ssh.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from commands import ToolError
from mpi_runtimes import Family, MpiRuntime

DEVICE = "wire0"
_PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "setpriv": "util-linux"}
_LETTERS = "abcdefgh"
_SWITCH = "switch"
_NAME = re.compile(rf"syncline-(\d+)-([{_LETTERS}]|{_SWITCH})")
# A small burst. But a segment of 64 KiB with the headers of its packets must fit, or the processor would have to cut it up.
# With this burst, 480 kB take 3.5 ms instead of 3.8.
_BURST, _LATENCY = "80kb", "100ms"
# The default of Linux, whatever this machine uses: with BBR a busy connection sends almost nothing for 0.2 s, every 10 s.
_CONGESTION = "cubic"
_NETWORK = "10.213.0"
_WIRE_S = 10.0
_PRIVATE = ("unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")

Handlers: TypeAlias = dict[signal.Signals, Any]


class EmulatedHosts:
    """A context in which the hosts exist. Afterwards nothing of them is left, also after an error or a signal.

    Args:
        rate: rate of each wire in each direction, in the notation of `tc`.
        count: how many hosts; 2 to 8.

    Raises:
        ToolError: on entering, if this machine or this user cannot emulate hosts; says what is missing and what to do.
    """

    def __init__(self, rate: str = "1gbit", count: int = 2) -> None:
        if not 2 <= count <= len(_LETTERS):
            raise ToolError(f"expected 2 to {len(_LETTERS)} emulated hosts, found {count}")
        self.names = tuple(f"syncline-{os.getpid()}-{letter}" for letter in _LETTERS[:count])
        self._switch = f"syncline-{os.getpid()}-{_SWITCH}"
        self._rate = rate

    def __enter__(self) -> EmulatedHosts:
        check_possible(os.geteuid())
        self._temporary = tempfile.TemporaryDirectory(prefix="syncline-hosts-")
        self._folder = Path(self._temporary.name)
        self._handlers = _handle(signal.SIGTERM, _end)
        try:
            self._remove_leftovers()
            self._write_files()
            self._make_network()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._remove()

    def run(self, runtime: MpiRuntime, per_host: int, words: Sequence[str | Path]) -> int:
        """Run a program on `per_host` ranks of each host; returns its exit status."""
        start = self._mpich(per_host) if runtime.family is Family.MPICH else self._open_mpi(per_host)
        count = ("-n", str(per_host * len(self.names)))
        command: list[str | Path] = [
            self._agent,
            self.names[0],
            shlex.join(map(str, (runtime.mpiexec, *start, *count, *words))),
        ]
        return subprocess.run(command, env={**os.environ, **runtime.env, **_ENV}).returncode

    def _mpich(self, per_host: int) -> tuple[str, ...]:
        agent = ("-launcher", "ssh", "-launcher-exec", str(self._agent))
        return (*agent, "-hosts", ",".join(self.names), "-ppn", str(per_host))

    def _open_mpi(self, per_host: int) -> tuple[str, ...]:
        agent = ("--allow-run-as-root", "--prtemca", "plm_ssh_agent", str(self._agent))
        hosts = ",".join(f"{name}:{per_host}" for name in self.names)
        network = ("--mca", "btl", "tcp,sm,self", "--mca", "btl_tcp_if_include", DEVICE)
        exported = [word for name in ("MPI4PY_LIBMPI", *_ENV, "PYTHONPATH", "OMP_NUM_THREADS") for word in ("-x", name)]
        return (*agent, "--host", hosts, "--bind-to", "none", *network, *exported)

    def start(self, line: str, environ: Mapping[str, str], host: int = 0) -> subprocess.Popen[str]:
        """Start a line of shell on a host. MPICH there starts ranks on other hosts through the agent, as through ssh."""
        launcher = {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(self._agent)}
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", self._agent, self.names[host], line],  # not to outlive this process
            env={**os.environ, **environ, **_ENV, **launcher},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def _agent(self) -> Path:
        return self._folder / "agent"

    def _write_files(self) -> None:
        addresses = [f"{_address(number)} {name}\n" for number, name in enumerate(self.names)]
        (self._folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(addresses))
        self._agent.write_text(agent_script(self._folder / "hosts"))
        self._agent.chmod(0o755)

    def _make_network(self) -> None:
        for name in self.names:
            _call("ip", "netns", "add", name)
        if len(self.names) == 2:
            first, second = self.names
            _call("ip", "link", "add", DEVICE, "netns", first, "type", "veth", "peer", "name", DEVICE, "netns", second)
        else:
            self._make_switch()
        for number, name in enumerate(self.names):
            _call("ip", "-n", name, "address", "add", f"{_address(number)}/24", "dev", DEVICE)
            _call("ip", "-n", name, "link", "set", "lo", "up")
            self._start_wire(name, DEVICE)
            _call(
                "ip",
                "-n",
                name,
                "route",
                "change",
                f"{_NETWORK}.0/24",
                "dev",
                DEVICE,
                "src",
                _address(number),
                "congctl",
                _CONGESTION,
            )
        for name in self.names:
            _await_wire(name)

    def _make_switch(self) -> None:
        switch, bridge = self._switch, "bridge0"
        _call("ip", "netns", "add", switch)
        _call("ip", "-n", switch, "link", "add", bridge, "type", "bridge")
        _call("ip", "-n", switch, "link", "set", bridge, "up")
        for number, name in enumerate(self.names):
            port = f"port{number}"
            _call("ip", "link", "add", DEVICE, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            _call("ip", "-n", switch, "link", "set", port, "master", bridge)
            self._start_wire(switch, port)

    def _start_wire(self, namespace: str, device: str) -> None:
        _call("ip", "-n", namespace, "link", "set", device, "up")
        limit = ("tbf", "rate", self._rate, "burst", _BURST, "latency", _LATENCY)
        _call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *limit)

    def _remove_leftovers(self) -> None:
        """Remove the hosts of earlier runs that were killed."""
        names = [line.split()[0] for line in _output("ip", "netns", "list").splitlines()]
        for name in left_over(names, lambda pid: Path(f"/proc/{pid}").exists()):
            _delete_namespace(name)

    def _remove(self) -> None:
        """Remove these hosts; must not be interrupted."""
        handlers = {**_handle(signal.SIGTERM, signal.SIG_IGN), **_handle(signal.SIGINT, signal.SIG_IGN)}
        for name in (*self.names, self._switch):
            _delete_namespace(name)
        self._temporary.cleanup()
        for number, handler in {**handlers, **self._handlers}.items():
            signal.signal(number, handler)


def _handle(number: signal.Signals, handler: Any) -> Handlers:
    """Set a signal's handler; returns the handler before."""
    return {number: signal.signal(number, handler)}


def _delete_namespace(name: str) -> None:
    """Delete a namespace, with its device. First its processes, because they keep it alive."""
    for pid in _output("ip", "netns", "pids", name).split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass
    _output("ip", "netns", "delete", name)


def left_over(names: Sequence[str], is_alive: Callable[[int], bool]) -> list[str]:
    """Our namespaces whose process has ended. Pure, except that it calls `is_alive`."""
    found = [(name, _NAME.fullmatch(name)) for name in names]
    return [name for name, match in found if match is not None and not is_alive(int(match[1]))]


_ENV = {
    "UCX_TLS": "tcp,self",  # otherwise UCX would find shared memory between hosts of one machine
    "UCX_NET_DEVICES": DEVICE,
    "GLOO_SOCKET_IFNAME": DEVICE,
}


def check_possible(user: int) -> None:
    """Check that this machine and this user can emulate hosts.

    Raises:
        ToolError: they cannot.
    """
    if not sys.platform.startswith("linux"):
        raise ToolError(f"emulated hosts need Linux's network namespaces; this is {sys.platform}")
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            raise ToolError(f"emulated hosts need the program {program}; on Debian and Ubuntu: apt install {package}")
    if user != 0:
        raise ToolError(f"emulated hosts need root, for they make network namespaces; this is user {user}. Run it with sudo")


def agent_script(hosts_file: Path) -> str:
    """The script for mpiexec in place of ssh. `ssh [options] HOST WORDS...` becomes the words, run by a shell on the host."""
    inside = "\n".join(
        (
            'hostname "$1"',
            "mount -t tmpfs tmpfs /dev/shm",
            f"mount --bind {shlex.quote(str(hosts_file))} /etc/hosts",
            'exec sh -c "$2"',
        )
    )
    return "\n".join(
        (
            "#!/bin/sh",
            'while [ "${1#-}" != "$1" ]; do shift; done',
            "host=$1; shift",
            f'exec ip netns exec "$host" {shlex.join(_PRIVATE)} sh -ec {shlex.quote(inside)} sh "$host" "$*"',
            "",
        )
    )


def _address(number: int) -> str:
    return f"{_NETWORK}.{number + 1}"


def _await_wire(namespace: str) -> None:
    """Wait until the kernel reports the wire as up, which is later than both its ends are: UCX uses no device before."""
    end = time.monotonic() + _WIRE_S
    while " state UP " not in _output("ip", "-n", namespace, "link", "show", DEVICE):
        if time.monotonic() > end:
            raise ToolError(f"the emulated wire of {namespace} was not up after {_WIRE_S:g} s; run it again")
        time.sleep(0.05)


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise ToolError(
            f"`{shlex.join(words)}` was refused: {done.stderr.strip()}; emulated hosts need the capabilities CAP_NET_ADMIN and "
            "CAP_SYS_ADMIN, which a container may lack (docker: --privileged)"
        )


def _output(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True).stdout


def _end(number: int, _: object) -> None:
    sys.exit(128 + number)
