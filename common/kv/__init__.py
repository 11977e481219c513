"""KV blocks: ids (`blocks`), memory (`pool`) and transport between processes (`transport`, a file for each kind).

Knows no models and no sockets.
"""
