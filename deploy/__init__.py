"""How the programs are put on a machine: the `baton` command, its supervisor, images, the demo model.

May import: the floor of `common`. Nothing imports `deploy`.
"""
