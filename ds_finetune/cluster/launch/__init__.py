"""Starting a run on many hosts, and ending it on all of them."""
