"""Operating system facilities: processes, memory, pauses, atomic replacement of files, facts of a host."""
