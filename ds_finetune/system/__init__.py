"""What the operating system gives: processes, memory, pauses, files replaced as a whole, messages between processes."""
