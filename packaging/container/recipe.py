# The image, for hpccm, which writes both files beside this one (pip install hpccm):
#
#   hpccm --recipe packaging/container/recipe.py --format docker > packaging/container/Dockerfile
#   hpccm --recipe packaging/container/recipe.py --format singularity > packaging/container/syncline.def
#
# `--userarg torch=2.13.0 extras=mpi,nccl-cuda13` chooses other contents. Both build from the root of a checkout. The image has
# no MPI library: the host's is bound in, and mpi4py's wheel takes whichever it finds, of MPICH's family or Open MPI.

# Debian 12 has glibc 2.36; the host's MPI library must not need a newer one.
base = USERARG.get("base", "docker.io/library/python:3.12-slim-bookworm")
# The version of torch; none takes the newest. For GPUs add the extra nccl-cuda12 or nccl-cuda13.
torch = "==".join(filter(None, ("torch", USERARG.get("torch"))))
extras = USERARG.get("extras", "mpi,report")

Stage0 += baseimage(image=base, _distro="debian", _docker_env=False)
Stage0 += comment("Syncline with all layers; the host's MPI is bound in")
Stage0 += environment(
    variables={
        # Where the host's MPI library is bound, and what that needs.
        "LD_LIBRARY_PATH": "/host/mpi/lib:/host/lib",
        # What is printed is seen at once, also when a rank is killed.
        "PYTHONUNBUFFERED": "1",
    }
)
Stage0 += shell(commands=[f"python3 -m pip install --no-cache-dir {torch}"])
Stage0 += copy(src="packages", dest="/opt/syncline-source/packages")
Stage0 += shell(
    commands=[
        f"python3 -m pip install --no-cache-dir '/opt/syncline-source/packages/syncline[{extras}]'",
        "syncline --help > /dev/null",
    ]
)
