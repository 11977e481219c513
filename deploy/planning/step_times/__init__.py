"""How long steps take and how much fits: measured rates, and what follows for other models."""
