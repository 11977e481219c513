"""`baton serve --autoscale`: workers change between prefill and decode when the mix of the load shifts.

`load` makes windows of the router's load reports. `proposal` chooses the worker to change and `judge` the time; both
are functions of figures and know no processes. `autoscaler` carries out the changes, and keeps the workers to run in
`Staff` of `deploy.processes.placement`.
"""
