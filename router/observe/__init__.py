"""What operators see: health, metrics of workers, history and the report of the status page, traces."""
