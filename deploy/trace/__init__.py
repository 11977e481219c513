"""`baton trace`: the parts of a trace merged and summed up."""
