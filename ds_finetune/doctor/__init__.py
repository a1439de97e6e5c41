"""Whether every machine of a run is ready: what is wrong on which host, before anything is started."""
