"""Foundations of all packages: errors, logs, files, number formats, versions, traces."""
