"""The command line: one module per command or family of commands."""
