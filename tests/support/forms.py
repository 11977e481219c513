"""Forms of matrices on devices that tests name."""

from common.models.forms import Forms, Target, forms_on


def on_cpu(choice: str) -> Forms:
    """Resolve a choice of `model.quantization` as a worker on a CPU does."""
    return forms_on(Target(None), choice)
