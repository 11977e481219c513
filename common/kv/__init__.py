"""KV blocks: ids (`blocks`), memory (`pool`) and their move between processes (`transport` and one file each).

Knows no models and no sockets.
"""
