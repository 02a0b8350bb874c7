"""Commands of ``python -m gluon_parallel``."""
