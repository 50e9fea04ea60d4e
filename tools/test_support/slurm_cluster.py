"""A Slurm cluster on this machine: munged, slurmctld and two slurmd, without systemd. Linux, root, Debian's packages.

1. The daemons run in their own namespaces: network (so fixed ports are free, and only this cluster reaches them over loopback),
   process ids, mounts, host name. The first process of the namespace starts them.
2. A command enters these namespaces to talk to Slurm.
3. When the first process ends, the kernel ends all others, also steps that slurmd has started and left. The first process ends
   with the process that made the cluster, for any reason.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

NODES = ("n0", "n1")
# The daemons take some seconds on free cores, and fifteen times as long on busy ones.
START_S = 100.0
_CALL_S = 60.0

# Each program, and its package in Debian and Ubuntu.
_PROGRAMS = {
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
_NAMESPACES = ("--net", "--pid", "--mount", "--uts", "--ipc")
# The address of a device that leads nowhere. With loopback alone, glibc resolves no name for Slurm (AI_ADDRCONFIG), and UCX
# reaches no peer on another host.
_ADDRESS = "10.214.0.1"
_CONTROLLER_PORT, _FIRST_NODE_PORT = 6817, 6818


def what_is_missing(user: int) -> str | None:
    """Why this machine or this user cannot have such a cluster, with the remedy; None if it can."""
    for program, package in _PROGRAMS.items():
        if shutil.which(program, path=_path()) is None:
            return f"a Slurm cluster needs the program {program}; on Debian and Ubuntu: apt install {package}"
    if user != 0:
        return f"a Slurm cluster needs root, for its namespaces; this is user {user}"
    tried = subprocess.run(("unshare", *_NAMESPACES, "--fork", "true"), capture_output=True, text=True)
    if tried.returncode != 0:
        return f"a Slurm cluster needs CAP_SYS_ADMIN, which a container may lack (docker: --privileged): {tried.stderr.strip()}"
    return None


class SlurmCluster:
    """A context in which the cluster is up. Afterwards nothing of it is left, also after an error.

    Raises:
        RuntimeError: on entering, if its nodes are not idle within `START_S` seconds; has the daemons' logs.
    """

    def __enter__(self) -> SlurmCluster:
        self._temporary = tempfile.TemporaryDirectory(prefix="syncline-slurm-")
        self.folder = Path(self._temporary.name)
        self._process: subprocess.Popen[str] | None = None
        try:
            self._write_files()
            self._start()
            self._wait_for_nodes()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def start(self, words: Sequence[str | Path], folder: Path, variables: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a command inside, in `folder`; its output and its errors are one text."""
        (first,) = self._first()
        enter = (*_DIES_WITH_US, "nsenter", "--target", first, *_NAMESPACES, f"--wd={folder}")
        return subprocess.Popen(
            [*enter, *_DIES_WITH_US, *map(str, words)],
            env={**os.environ, "PATH": _path(), "SLURM_CONF": str(self._file("slurm.conf")), **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def call(self, *words: str, timeout_s: float = _CALL_S) -> str:
        """The output of a command of Slurm.

        Raises:
            RuntimeError: the command ended with another status than 0.
        """
        process = self.start(words, self.folder, {})
        output, _ = process.communicate(timeout=timeout_s)
        if process.returncode != 0:
            raise RuntimeError(f"`{shlex.join(words)}` ended with status {process.returncode}: {output}")
        return output

    def logs(self) -> str:
        """The daemons' logs."""
        return "\n".join(f"--- {path.name} ---\n{path.read_text(errors='replace')}" for path in self.folder.glob("*.log"))

    def _file(self, name: str) -> Path:
        return self.folder / name

    def _write_files(self) -> None:
        for name in ("state", "cgroup", *NODES, *(f"{node}-tmp" for node in NODES)):
            self._file(name).mkdir()
        key = self._file("munge.key")
        key.touch(0o400)
        key.write_bytes(secrets.token_bytes(128))
        self._file("hosts").write_text("".join(f"127.0.0.1 {name}\n" for name in ("localhost", *NODES)))
        self._file("slurm.conf").write_text(configuration(self.folder))
        self._file("first.sh").write_text(first_process(self.folder))

    def _start(self) -> None:
        words = (
            *_DIES_WITH_US,
            "unshare",
            *_NAMESPACES,
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            self._file("first.sh"),
        )
        with self._file("daemons.log").open("w") as log:
            self._process = subprocess.Popen(
                words, env={**os.environ, "PATH": _path()}, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True
            )

    def _wait_for_nodes(self) -> None:
        end_s, said = time.monotonic() + START_S, ""
        while time.monotonic() < end_s:
            try:
                said = self.call("sinfo", "--noheader", "--Node", "--format=%T", timeout_s=20)
                if said.split() == ["idle"] * len(NODES):
                    return
            except (RuntimeError, ValueError, OSError, subprocess.TimeoutExpired) as error:
                said = str(error)
            time.sleep(0.2)
        raise RuntimeError(f"the nodes are not idle after {START_S:g} s: {said}\n{self.logs()}")

    def _remove(self) -> None:
        if self._process is not None:
            # `unshare` ends when all processes of the namespace have ended. If `unshare` itself were killed, the daemons could
            # write into the folder a moment longer.
            first = self._first()
            for process in first:
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            if not first:
                self._process.kill()
            self._process.wait()
        self._temporary.cleanup()

    def _first(self) -> list[str]:
        """The first process of the namespace, which is the child of `unshare`; empty before it is started."""
        assert self._process is not None
        return Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()


# The kernel sends it when the thread ends that started the process.
_DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")


def _path() -> str:
    """A PATH with the folders of the daemons, which Debian has only in root's PATH."""
    return os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))


def configuration(folder: Path) -> str:
    """slurm.conf. No accounting, no cgroups; nodes may have more cores than this machine.

    TmpFS differs by node: in one folder, the PMIx servers of two nodes would take each other's files.
    """
    nodes = "\n".join(
        f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={_FIRST_NODE_PORT + number} CPUs=16"
        for number, node in enumerate(NODES)
    )
    return f"""\
ClusterName=syncline
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={_CONTROLLER_PORT}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
TmpFS={folder}/%n-tmp
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=0
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=3
InactiveLimit=0
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def start_node(name: str) -> str:
    """A line of sh that sets the host name and the shared memory, then starts slurmd."""
    return f"hostname {name}; mount -t tmpfs tmpfs /dev/shm; exec slurmd -D -N {name}"


def first_process(folder: Path) -> str:
    """The script of the first process, for sh. It waits for the daemons, and so reaps processes that they leave.

    Each slurmd and its jobs see their own host name and shared memory.
    """
    munge = f"--key-file={folder}/munge.key --socket={folder}/munge.socket --pid-file={folder}/munge.pid"
    nodes = "\n".join(f"unshare --uts --ipc --mount sh -ec '{start_node(node)}' &" for node in NODES)
    return f"""\
hostname localhost
ip link set lo up
ip link add wire0 type veth peer name wire1
ip address add {_ADDRESS}/24 dev wire0
ip link set wire0 up
ip link set wire1 up
mount --rbind /sys/fs/cgroup {folder}/cgroup
mount -t sysfs sysfs /sys
mount --rbind {folder}/cgroup /sys/fs/cgroup
mount --bind {folder}/hosts /etc/hosts
export SLURM_CONF={folder}/slurm.conf
munged --foreground --force {munge} --log-file={folder}/munge.log --seed-file={folder}/munge.seed &
while [ ! -S {folder}/munge.socket ]; do sleep 0.1; done
slurmctld -D &
{nodes}
wait
"""
