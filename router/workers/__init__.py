"""Connections to workers, memory servers and operators, and handlers of the received messages."""
