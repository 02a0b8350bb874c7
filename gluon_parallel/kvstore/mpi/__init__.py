"""The store ``mpi``: point-to-point messages matched by key and shared memory on one host."""
