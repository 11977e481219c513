"""Views for operators: health, metrics of workers, history and report of the status page, traces."""
