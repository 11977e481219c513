"""What both workers compute on: the device with a model and a pool on it, prompt steps, tokens on their way back."""
