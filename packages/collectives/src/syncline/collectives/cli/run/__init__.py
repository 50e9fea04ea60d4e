"""`syncline run`: a script written for torchrun, unmodified, under mpirun and srun.

In the order in which a rank comes through:

1. `command`: the options, and what is refused before anything starts.
2. `ranks`: who this process is, as MPI says it, or Slurm, or PMI; torchrun's variables.
   `local`: where nothing has launched this process, it starts the ranks.
3. `output`: what the options say about the standard streams.
4. `answers`: what torch.distributed answers the script with; done when the script imports torch, and not before.
5. `script`: the script as `__main__`.
6. `ending`: how the rank leaves the job, in good order or not.

Nothing here imports torch or mpi4py before it is needed, nor what does.
"""
