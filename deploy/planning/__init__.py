"""How many workers a load takes: rates as they were measured, a simulator of the queues between workers, and a search.

Knows no sockets but those of a router that is asked for its rates. The order of prompts is the workers' own code.
"""
