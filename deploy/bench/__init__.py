"""`baton bench`: loads a server over HTTP as clients do, and shows figures during the run."""
