-- Syncline in a shared folder, as the page "For the people who run the cluster" installs it. Change the two lines below.
local root = "/opt/syncline/0.1.0"
local needs = { "PyTorch/2.13.0" } -- and the module of the MPI library, unless it is on PATH anyway

help([[
Distributed data parallel training for PyTorch over the MPI, NCCL or Gloo that this cluster has.
Start a training with mpirun or srun. `syncline doctor` says whether this machine is in order:

    srun -N 2 -n 4 --mpi=pmix syncline doctor
]])
whatis("Name: Syncline")
whatis("Version: 0.1.0")
whatis("Description: Distributed data parallel training for PyTorch over MPI, NCCL and Gloo")

for _, name in ipairs(needs) do
    depends_on(name)
end
prepend_path("PATH", pathJoin(root, "bin"))
setenv("SYNCLINE_SITE", pathJoin(root, "site.toml"))
