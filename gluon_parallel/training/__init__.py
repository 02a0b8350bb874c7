"""Around a training script's loop: config, runs, checkpoints, progress, reports."""
