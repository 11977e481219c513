"""Times of steps and room for KV: measured rates, and estimates for other models."""
