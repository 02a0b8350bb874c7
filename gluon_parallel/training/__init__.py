"""Training scripts: settings, runs, checkpoints, and what a person sees of them."""
