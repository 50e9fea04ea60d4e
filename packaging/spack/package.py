# Copy it to packages/py_syncline/package.py of a Spack repository of your own, and enter the path of your checkout below: the
# project has published no address to fetch from.

from spack.package import *  # Spack's own way
from spack_repo.builtin.build_systems.python import PythonPackage, PythonPipBuilder


class PySyncline(PythonPackage):
    """Distributed data parallel training for PyTorch over MPI, NCCL or Gloo: all four layers."""

    git = "file:///path/to/checkout"

    license("BSD-3-Clause")

    version("main", branch="main")

    variant("mpi", default=True, description="Communicate over MPI")
    variant("report", default=False, description="Pages of syncline report")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-hatchling@1.26:", type="build")
    depends_on("py-torch@2.6:2 +distributed", type=("build", "run"))
    depends_on("py-typing-extensions@4.5:", type=("build", "run"))
    depends_on("py-tomli@2:", type=("build", "run"), when="^python@:3.10")
    depends_on("py-numpy@1.24:", type=("build", "run"))
    depends_on("py-pyzmq@26:", type=("build", "run"))
    depends_on("py-mpi4py@4:", type=("build", "run"), when="+mpi")
    depends_on("py-plotly@5.20:", type=("build", "run"), when="+report")
    depends_on("py-rich@13:", type=("build", "run"), when="+report")

    import_modules = ["syncline.collectives", "syncline.reducer", "syncline.hooks", "syncline.ddp"]

    def install(self, spec, prefix):
        for layer in ("collectives", "reducer", "hooks", "ddp"):
            pip(*PythonPipBuilder.std_args(self), f"--prefix={prefix}", join_path("packages", layer))
