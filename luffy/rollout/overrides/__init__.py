"""Token overrides: a second model may replace the policy's tokens while they are generated (docs/overrides.md)."""
