"""Which layouts a run may have on given machines, and which of them fit, without torch."""
