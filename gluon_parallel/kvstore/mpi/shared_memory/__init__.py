"""Sums and gathering between the processes of one host through shared memory, by the C library."""
