"""The run file: its schema, the reader of its YAML, and error messages that name key and line."""
