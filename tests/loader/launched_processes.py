"""Variables that launchers set, as processes that they started saw them (2026-11-27).

Open MPI 4.1.4, MPICH 4.0.2 and Slurm 22.05.8 of Debian 12, and torchrun of torch 2.13,
each with two processes on one node; those of process 1, and of process 0 where there is
no other.  Left out are addresses, and names of folders.
"""

_OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_ID": "1677524993.1",
    "PMIX_NAMESPACE": "1677524993",
    "PMIX_RANK": "1",
}
_MPICH = {
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "8",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
_BATCH_SCRIPT = {
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NPROCS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
}
_SRUN = {
    **_BATCH_SCRIPT,
    "SLURM_LOCALID": "1",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}
_SRUN_OF_ONE = {
    **_BATCH_SCRIPT,
    "SLURM_NPROCS": "1",
    "SLURM_NTASKS": "1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
_TORCHRUN = {
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "RANK": "1",
    "WORLD_SIZE": "2",
}
PROCESSES: dict[str, tuple[dict[str, str], tuple[int, int] | None]] = {
    "mpirun of Open MPI": (_OPEN_MPI, (1, 2)),
    "mpirun of MPICH": (_MPICH, (1, 2)),
    "torchrun": (_TORCHRUN, (1, 2)),
    "srun": (_SRUN, (1, 2)),
    "srun --mpi=pmi2": (
        {**_SRUN, "PMI_FD": "11", "PMI_JOBID": "2.0", "PMI_RANK": "1", "PMI_SIZE": "2"},
        (1, 2),
    ),
    "srun --mpi=pmix": (
        {**_SRUN, "PMIX_NAMESPACE": "slurm.pmix.3.0", "PMIX_RANK": "1"},
        (1, 2),
    ),
    "srun -n 1": (_SRUN_OF_ONE, (0, 1)),
    "sbatch": (_BATCH_SCRIPT, None),
    "sbatch, mpirun of Open MPI": ({**_BATCH_SCRIPT, **_OPEN_MPI}, (1, 2)),
    # Hydra's daemons are a step of Slurm's, of one task a node.
    "sbatch, mpirun of MPICH": (
        {**_SRUN_OF_ONE, "SLURM_NTASKS": "2", **_MPICH},
        (1, 2),
    ),
    "srun -n 1 torchrun": ({**_SRUN_OF_ONE, **_TORCHRUN}, (1, 2)),
    "sbatch --ntasks=1": ({**_BATCH_SCRIPT, "SLURM_NTASKS": "1"}, (0, 1)),
}
"""What each process saw, with its rank and how many there are; None where a process
cannot tell whether it is alone."""
