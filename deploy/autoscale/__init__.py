"""`baton serve --autoscale`: workers change between prefill and decode when the mix of the load shifts.

`load` makes windows of what the router tells, `proposal` says which worker should change and why, `judge` when: both
are functions of figures and know no processes. `staff` is who is to run, `autoscaler` does it.
"""
