"""`syncline run` runs a torchrun script without changes: under mpirun or srun, or on ranks that this command starts.

A rank passes through the modules in this order:

1. `command`: reads the options, and refuses bad ones before anything starts.
2. `ranks`: finds this process's rank, from MPI, Slurm or PMI, and sets torchrun's variables.
   `local`: starts the ranks, if no launcher started this process.
3. `output`: redirects the standard streams, as the options say.
4. `answers`: changes torch.distributed, so that the script gets our groups. This happens when the script imports torch.
5. `script`: runs the script as `__main__`.
6. `ending`: lets the rank leave the job, after success or failure.

No module here imports torch or mpi4py, directly or indirectly, before the rank needs them.
"""
