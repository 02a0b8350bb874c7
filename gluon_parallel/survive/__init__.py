"""Training that goes on when processes are lost or join."""
