"""Reading of the shared secret, with checks against other readers and guessing."""

import os
import stat
from itertools import pairwise

from common.base.errors import ConfigError
from common.base.plain_file import open_plain, read_descriptor

MIN_BYTES = 32
MAX_BYTES = 1 << 20
MIN_VALUES = 8
"""Least number of different bytes, and of differences between neighbours; 32 random hex digits have about 14 and 20."""
REMEDY = "make one with `openssl rand -hex 32`"


def read_secret(path: str) -> bytes | None:
    """Return the secret in a file, None without a path; raises ConfigError for unreadable, exposed or weak secrets."""
    if not path:
        return None
    where = f"net.secret_file = {path}"
    try:
        descriptor = open_plain(path)
        problem = _readers(os.fstat(descriptor))
        secret = read_descriptor(descriptor, MAX_BYTES + 1).strip()
    except PermissionError:
        raise ConfigError(
            f"{where}: this process's user, {os.getuid()}, may not read it; give it the file (`chown {os.getuid()}`)"
        ) from None
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from None
    if problem := problem or _weakness(secret):
        raise ConfigError(f"{where}: {problem}")
    return secret


def _readers(status: os.stat_result) -> str:
    """Say who else may read or write the file; "" if none. The group may read a file owned by a different user."""
    mode = stat.S_IMODE(status.st_mode)
    allowed = 0o700 if status.st_uid == os.getuid() else 0o750
    if not stat.S_ISREG(status.st_mode) or not mode & ~allowed & 0o777:
        return ""
    return f"others may read or write it (mode {mode:o}): `chmod 600`, and make a new one if they are not to be trusted"


def _weakness(secret: bytes) -> str:
    """Say why the secret could be guessed; "" for a strong secret."""
    if len(secret) < MIN_BYTES:
        return f"{len(secret)} bytes; at least {MIN_BYTES}: {REMEDY}"
    if len(secret) > MAX_BYTES:
        return f"more than {MAX_BYTES:,} bytes; name a secret"
    num_steps = len({after - before for before, after in pairwise(secret)})
    if min(len(set(secret)), num_steps) < MIN_VALUES:
        return f"it can be guessed, because few of its {len(secret)} bytes differ or they follow a rule: {REMEDY}"
    return ""
