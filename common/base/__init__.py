"""What every room stands on: errors, logs, files, number formats, versions, traces."""
