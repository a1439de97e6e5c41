"""Output to the console: tables, progress lines of long phases, and filters for messages of other packages."""
