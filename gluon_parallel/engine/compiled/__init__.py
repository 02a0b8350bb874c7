"""Toolkit of compiled code: compile functions, call C and Python from them, share records, atomic words and locks.

``records`` and ``pthread`` are for Python, ``functions`` and ``access`` for compiled code: these import Numba, which
takes a fifth of a second.
"""
