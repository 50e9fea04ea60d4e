"""What a site runs after each upgrade of Syncline, torch, MPI or the network. Needs ReFrame: pip install reframe-hpc.

    reframe -C settings.py -c syncline_checks.py -r

Each check is one job of `num_tasks` ranks, one minute at most. `-S num_tasks=8 -S num_tasks_per_node=4` takes more.
"""

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.builtins import performance_function, run_after, sanity_function, variable


class SynclineCheck(rfm.RunOnlyRegressionTest):
    """A job under the partition's launcher, with the environment's modules."""

    valid_systems = ["*"]
    valid_prog_environs = ["syncline"]
    num_tasks = 2
    num_tasks_per_node = 2
    time_limit = "5m"

    @run_after("init")
    def one_thread(self):
        """Ranks share the cores of their node, and what a rank prints before it is killed must be seen."""
        self.env_vars = {"OMP_NUM_THREADS": 1, "PYTHONUNBUFFERED": 1, "SYNCLINE_REPORT_DIR": ""}


@rfm.simple_test
class Doctor(SynclineCheck):
    """Nothing is wrong with the machine; what is worth a look may be."""

    executable = "syncline"
    executable_opts = ["doctor"]

    @sanity_function
    def is_healthy(self):
        """`syncline doctor` ends with one of these lines."""
        return sn.assert_found(r"^(everything is fine|0 wrong, .*)$", self.stdout)


@rfm.simple_test
class Conformance(SynclineCheck):
    """Every collective gives the right values over the backend that a training would get."""

    executable = "python3"
    executable_opts = ["job.py", "conformance"]

    @sanity_function
    def all_passed(self):
        """The line that rank 0 prints."""
        return sn.assert_found(r"^\d+ checks passed in ", self.stdout)


@rfm.simple_test
class Bandwidth(SynclineCheck):
    """A sum of 25 MiB, a bucket of gradients, beside what memory alone allows. Run it on nodes that are otherwise idle."""

    executable = "syncline"
    executable_opts = ["bench", "--sizes", "25M", "25M", "--seconds", "2", "--backends", "mpi-in-window", "floor"]
    #: In percent of the floor; less fails. The ranks of one node reach 60 to 95, over a network it is the network's share.
    least = variable(int, value=40)

    @sanity_function
    def was_measured(self):
        """Both lines are there."""
        return sn.all([sn.assert_found(r"mpi-in-window +\d", self.stdout), sn.assert_found(r"floor +\d", self.stdout)])

    @performance_function("%")
    def of_the_floor(self):
        """The bandwidth in percent of the floor's."""
        return 100 * self.bandwidth("mpi-in-window") / self.bandwidth("floor")

    @performance_function("GB/s")
    def bus_bandwidth(self):
        """As nccl-tests define it."""
        return self.bandwidth("mpi-in-window")

    def bandwidth(self, backend):
        """The bus bandwidth in the backend's line: size, backend, four times, bandwidths of the algorithm and of the bus."""
        return sn.extractsingle(rf"^ *25M +{backend}(?: +[\d.]+){{5}} +([\d.]+)", self.stdout, 1, float)

    @run_after("setup")
    def expect(self):
        """The same on every system; a site may know better."""
        self.reference = {"*": {"of_the_floor": (self.least, 0, None, "%")}}


@rfm.simple_test
class ReplicasStayEqual(SynclineCheck):
    """A training whose loss falls, and whose replicas are equal bit for bit."""

    executable = "python3"
    executable_opts = ["job.py", "replicas"]

    @sanity_function
    def are_equal(self):
        """The line that rank 0 prints."""
        return sn.assert_found(rf"^{self.num_tasks} replicas of \d+ parameters are equal after ", self.stdout)


@rfm.simple_test
class KilledRankIsNamed(SynclineCheck):
    """The last rank is killed; the launcher or the other ranks say which it was, and nothing waits for it."""

    executable = "python3"
    executable_opts = ["job.py", "killed"]

    @run_after("setup")
    def let_the_others_speak(self):
        """Slurm would end them before they can."""
        if self.job.launcher.registered_name == "srun":
            self.job.launcher.options += ["--no-kill", "--kill-on-bad-exit=0"]

    @sanity_function
    def is_named(self):
        """Syncline's RankLostError, the line of Open MPI's mpirun, Hydra's table, or srun's."""
        last = self.num_tasks - 1
        told = rf"lost.*rank {last}\b|rank {last}\b.*(lost|signal 9|KILLED)|EXIT CODE: 9|task {last}: Killed"
        return sn.all(
            [
                sn.assert_not_found("nobody was killed", self.stdout),
                sn.assert_true(sn.count(sn.chain(sn.findall(told, self.stdout), sn.findall(told, self.stderr)))),
            ]
        )
