"""Parts of a layer with their weights; each adds its result to the residual stream."""
