"""All that touches MXNet below its public interface: its engine, launching threads, builds for GPUs, and repairs."""
