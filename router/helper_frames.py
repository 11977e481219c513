"""What goes before each message between the router and the processes beside it; nothing else is imported here."""

import struct

BODY = struct.Struct("<BQQ")
"""To a process that reads: kind and bytes of the body that follows, and the longest prompt with its output, tokens."""
REPLY = struct.Struct("<QQQ")
"""From it: bytes that follow; tokens of the body's texts that were found in its cache, and that were encoded."""
GRAMMAR = struct.Struct("<QQ")
"""To and from the process for grammars: the number of one, and bytes that follow."""
