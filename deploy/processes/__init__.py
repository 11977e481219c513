"""Processes of one machine: where they run, how they are started, supervised and ended."""
