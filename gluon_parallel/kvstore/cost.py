"""Model of what one exchange between processes takes, from latency and bandwidth."""

PER_MESSAGE = 1e-6  # seconds of processor time for a message, whatever its size


def exchange_seconds(num_workers, size, latency, bandwidth, kind="mpi"):
    """Seconds that one exchange of `size` bytes among `num_workers` processes takes, each on a host of its own.

    mpi: everyone sends each other one its part, adds up its own, and sends that to all; ring (Horovod): the same bytes
    in 2 (num_workers - 1) steps, one after the other; ps: everyone sends all to the servers, one per process, and gets
    it back. No congestion, and equal processes.

    Args:
        latency: seconds.
        bandwidth: bytes per second of each process.
        kind: ``mpi``, ``ring`` or ``ps``.

    Example:
        >>> round(exchange_seconds(4, 100e6, latency=25e-6, bandwidth=1.25e9), 4)
        0.1201
    """
    bytes_each = 2 * size * (num_workers - 1) / num_workers / bandwidth
    rounds_of_messages = {"mpi": 2, "ring": 2 * (num_workers - 1), "ps": 2}[kind]
    each_message = {"mpi": num_workers - 1, "ring": num_workers - 1, "ps": num_workers}[kind] * 2 * PER_MESSAGE
    return rounds_of_messages * latency + each_message + bytes_each
