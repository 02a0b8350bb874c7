"""Sums on GPUs with an MPI that takes their memory."""
