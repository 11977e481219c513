"""Which workers get a request: who is there, what lies where, and what each pair costs."""
