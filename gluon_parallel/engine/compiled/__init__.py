"""Toolkit of compiled code: compile functions, call C and Python from them, share records, atomic words and locks.

``library`` loads compiled code; ``records`` and ``pthread`` are for Python. ``functions`` and ``access`` are for
compiled code: they import Numba, which takes half a second, and Python imports them to compile only.
"""
