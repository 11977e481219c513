"""Deployment of the programs on a machine: the `baton` command, the supervisor, images, the demo model.

May import: the floor of `common`, and for `planning` the order of prompts. Nothing but benchmarks imports `deploy`.
"""
