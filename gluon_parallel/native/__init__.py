"""Words of memory, C functions and mutexes for code that Numba compiles."""
