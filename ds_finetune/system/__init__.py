"""Operating system facilities: processes, memory, pauses, atomic file replacement, messages between processes."""
