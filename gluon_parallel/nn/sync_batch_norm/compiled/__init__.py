"""What runs without Python's lock: the passes of the operator, their arithmetic, and how devices wait. Needs Numba."""
