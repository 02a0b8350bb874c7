"""The store ``mpi``: point-to-point messages matched by key, shared memory on one host, CUDA-aware MPI on GPUs."""
