"""Hugging Face models as luffy runs them: one attention function, one forward pass, safe loading."""
