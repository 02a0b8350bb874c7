"""Processes that join a training under way, and what those that run do to meet them."""
