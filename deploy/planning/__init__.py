"""`baton plan`: number of workers for a load, from measured rates, a simulator of the queues, and a search.

Uses no sockets, except to ask a router for rates. The order of prompts is the workers' own code.
"""
