"""How many file descriptors a process may have: every connection, worker and file takes one."""

import resource

MOST = 1 << 20


def raise_open_files() -> int:
    """Allow this process as many as the system lets it have; returns how many that are."""
    soft, hard = (MOST if limit == resource.RLIM_INFINITY else limit for limit in _limits())
    most = max(soft, min(hard, MOST))
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, _limits()[1]))
    return most


def _limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)
