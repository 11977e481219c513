"""Sessions of fronts at the dispatcher: their orders become completions, and the tokens go back."""
