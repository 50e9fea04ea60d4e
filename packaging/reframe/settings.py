"""How ReFrame starts jobs here. Change the names of modules, partitions and options to the site's, or add `syncline` as an
environment to the settings that the site has.
"""

site_configuration = {
    "systems": [
        {
            "name": "cluster",
            "descr": "Two ways to start ranks: by mpirun on this node, by srun in a job of Slurm",
            "hostnames": [".*"],
            "modules_system": "lmod",
            "partitions": [
                {"name": "here", "scheduler": "local", "launcher": "mpirun", "environs": ["syncline"], "max_jobs": 1},
                {
                    "name": "slurm",
                    "scheduler": "squeue",  # "slurm" where `sacct` answers
                    "launcher": "srun",
                    "env_vars": [["SLURM_MPI_TYPE", "pmix"]],  # or pmi2: the page on Slurm says which
                    "environs": ["syncline"],
                    "max_jobs": 1,
                },
            ],
        }
    ],
    "environments": [{"name": "syncline", "modules": ["syncline/0.1.0"]}],
}
