"""What tests of grammars share."""

from pathlib import Path

DEMO_MODEL = Path(__file__).parents[1] / "deploy" / "demo_model"
