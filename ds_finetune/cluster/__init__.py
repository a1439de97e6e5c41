"""Starts, supervises and checks runs on several processes and hosts."""
