"""How the programs are put on a machine: the `baton` command, its supervisor, images, the demo model.

May import: the floor of `common`, and for `planning` the order of prompts. Nothing but benchmarks imports `deploy`.
"""
