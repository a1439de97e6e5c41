"""Tables, lines of phases, and the messages of other packages that are shown or counted."""
