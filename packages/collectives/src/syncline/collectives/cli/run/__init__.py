"""`syncline run` runs an unchanged torchrun script, either under mpirun or srun, or on ranks that this command starts.

A rank uses the modules in this order:

1. `command`: reads the options.
2. `ranks`: finds this process's rank, from MPI, Slurm or PMI, and sets torchrun's variables.
   `local`: starts the ranks, if no launcher started this process.
3. `output`: redirects the standard streams, if the options say so.
4. `answers`: changes torch.distributed, so that the script gets Syncline's groups.
5. `script`: runs the script as `__main__`.
6. `ending`: ends the rank, after success or failure, so that no other rank waits for this rank for ever.

These modules import torch and mpi4py only when the rank needs them, because these imports take long.
"""
