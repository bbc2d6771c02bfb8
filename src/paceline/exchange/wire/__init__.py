"""Frames between processes: over TCP, Unix sockets and shared memory, authenticated, without pickle."""
