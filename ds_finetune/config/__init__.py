"""The run file: its schema, its YAML with line numbers, and the errors of both."""
