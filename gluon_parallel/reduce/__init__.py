"""Sums of a trainer's gradients over devices and processes, with the small numbers of each step."""
